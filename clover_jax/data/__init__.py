"""From files to prompts and to training batches; `README.md` says more."""
