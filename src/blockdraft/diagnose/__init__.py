"""Why drafting is not faster: `explain` looks at what was rejected, `doctor` at the pair."""
