"""A process of its own (TRITON_INTERPRET=1) that compares a patched tiny model with the plain one on the CPU.

Triton's interpreter keeps bfloat16 as bit patterns and lacks the device library; both are put right here, so that
Liger's kernels compute what compiled ones do: bfloat16 operations in float32, rounded to nearest even.
"""

import sys

import numpy as np
import torch
import triton.language as tl
import triton.language.extra.libdevice as libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def to_bits(data):
    return torch.from_numpy(np.ascontiguousarray(data, np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()


def to_numbers(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return torch.from_numpy(np.ascontiguousarray(handle.data)).view(torch.bfloat16).float().numpy()


def mend_interpreter():
    convert_float, implicit = interpreter._convert_float, interpreter._implicit_cvt
    binary, unary = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op

    def rounded(data, source, target, mode):
        is_narrowing = source == tl.float32 and target == tl.bfloat16
        return to_bits(data) if is_narrowing else convert_float(data, source, target, mode)

    def with_floats(value):  # Python floats reach kernels as they are, compiled code gets float32
        if isinstance(value, float):
            return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return implicit(value)

    def narrow(output):
        return TensorHandle(output if output.dtype == bool else to_bits(output), tl.bfloat16)

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        return narrow(op(to_numbers(lhs), to_numbers(rhs)))

    def unary_op(self, arg, op):
        return unary(self, arg, op) if arg.dtype.scalar != tl.bfloat16 else narrow(op(to_numbers(arg)))

    interpreter._convert_float, interpreter._implicit_cvt = rounded, with_floats
    InterpreterBuilder.binary_op, InterpreterBuilder.unary_op = binary_op, unary_op
    libdevice.rsqrt = lambda x: tl.math.rsqrt(x)  # looked up when it runs: the interpreter replaces tl.math then


def rows(model, micro, low):
    """Hidden rows and the gradient of all parameters, in float32 or under bfloat16 autocast."""
    from fastrl.models.forward import hidden_rows

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        out = hidden_rows(model, micro)
    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return out.detach().float(), gradient


def main(family):
    mend_interpreter()
    from tiny_models import ragged_batch, tiny_model

    from fastrl.data.packing import pack
    from fastrl.models.liger import apply_liger
    from fastrl.models.load import prepare_model

    (micro,) = pack(ragged_batch([4, 3], [[3, 5], [2]]), max_tokens=100)
    plain = prepare_model(tiny_model(family, dtype=torch.float32))
    exact, rounded = rows(plain, micro, False), rows(plain, micro, True)
    model = tiny_model(family, dtype=torch.float32)
    replaced = apply_liger(model)
    model = prepare_model(model)
    assert replaced == ["rms_norm", "rope", "swiglu"], replaced
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp):
        assert type(module).forward is not module.forward.__func__, f"{type(module).__name__} is not patched"
    for what, wanted, low, got, got_low in zip(
        ("rows", "gradient"), exact, rounded, rows(model, micro, False), rows(model, micro, True)
    ):
        size = wanted.norm()
        error, low_error, own = ((wanted - x).norm() / size for x in (got, got_low, low))
        print(f"{what}: float32 {error:.1e}, bfloat16 {low_error:.1e} (without Liger {own:.1e})")
        assert error <= 1e-5
        assert 0 < own < 0.1 and low_error <= 1.5 * own  # no further from float32 than bfloat16 is by itself
    print("same")


if __name__ == "__main__":
    main(sys.argv[1])
