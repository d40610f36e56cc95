"""The reference: torch's operations, with the bits of the models' own, on any device."""
