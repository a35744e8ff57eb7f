"""Meshes, and which part of every array lies where on one."""
