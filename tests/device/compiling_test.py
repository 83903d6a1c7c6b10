"""Whether a process compiles, as JAX's own events tell it."""

import jax

from fp8jax.device.compiling import Compiling


def test_it_compiles_from_the_end_of_lowering_to_the_end_of_compiling():
    compiling = Compiling()
    compiling.open()
    try:
        assert compiling.seconds() == 0 and not compiling.makes_program()
        jax.make_jaxpr(jax.jit(lambda x: x * 42.5))(1.0)  # traced only
        assert compiling.seconds() == 0 and compiling.makes_program()
        assert not compiling.makes_program()
        lowered = jax.jit(lambda x: x * 43.5).lower(1.0)
        assert 0 < compiling.seconds() < 60
        assert compiling.makes_program() and compiling.makes_program()
        lowered.compile()
        assert compiling.seconds() == 0
        jax.jit(lambda x: x * 44.5).lower(1.0)
        compiling.forget()
        assert compiling.seconds() == 0
    finally:
        compiling.close()
    jax.jit(lambda x: x * 45.5).lower(1.0)
    assert compiling.seconds() == 0
