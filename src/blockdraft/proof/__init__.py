"""Claims that users check themselves: proof of exactness, and the reason of each rejection."""
