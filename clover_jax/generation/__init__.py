"""From prompt rows to output rows: turns, stop strings, figures, text on a terminal."""
