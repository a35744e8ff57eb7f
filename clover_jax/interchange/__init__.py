"""Draft heads on disk: native draft directories and third-party layouts."""
