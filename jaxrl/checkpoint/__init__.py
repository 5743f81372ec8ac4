"""What is kept on disk: Hugging Face folders in and out, GGUF in, our own training state.

Import the module you need: each brings in only its own library.
"""
