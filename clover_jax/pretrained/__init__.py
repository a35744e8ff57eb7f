"""Base models in Hugging Face formats: found, read, checked, identified by a fingerprint."""
