"""Training of a Hydra head (`models.draft.hydra_head`) beside a drafter that exists."""
