"""What cuDNN reads of a cache, by the same function of JAX as an ordinary program."""

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.decoding.cache_reading import read_by_cudnn
from clover_jax.models.attention import attend
from clover_jax.models.cache import KeyValue


def test_rows_of_any_length_are_read_as_xla_reads_them():
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape):
        return jax.random.normal(next(keys), (3, 2, *shape))

    query, fresh = normal(4, 7, 16), KeyValue(normal(7, 16), normal(7, 16))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((7, 7), bool)), (3, 7, 7))
    # What lies beyond a row's end must not matter, nor anything of a row without one.
    length, cache = jnp.array([0, 1, 512]), KeyValue(normal(512, 16), normal(512, 16))
    cache = jax.tree.map(lambda x: x.at[:2, :, 1:].set(1e4), cache)

    by_xla = attend(query, fresh, mask, cache, length)
    cache = cache.replace(reader=lambda *given: read_by_cudnn(*given[:3], implementation="xla"))
    by_kernel = attend(query, fresh, mask, cache, length)
    np.testing.assert_allclose(by_kernel, by_xla, atol=1e-6)
