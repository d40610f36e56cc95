"""Exact block-diffusion speculative decoding."""
