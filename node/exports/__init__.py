"""The model for other programs: files, Hugging Face folders, text."""
