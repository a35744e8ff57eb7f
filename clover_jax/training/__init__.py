"""Distilling a draft head: teacher, losses, the jitted step and the loop around it."""
