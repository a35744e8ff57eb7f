"""Meshes, and which part of every array lies where on one."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "meshes": ["MeshShape", "make_mesh", "mesh_for", "parse_mesh"],
        "param_layouts": ["LAYOUTS", "param_spec"],
        "placement": ["param_shardings", "place_on"],
    },
)
