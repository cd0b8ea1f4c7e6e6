"""The kernels of `head_kernels.py`, which says what they compute. One program per row.

With TRITON_INTERPRET=1 they run on a CPU, without a compiler.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def read(logits, target, logprob, entropy, logz, num_words, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, num_words, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = words < num_words
        value = tl.load(logits + row * stride + words, mask=inside, other=-float("inf"))
        now = tl.maximum(largest, tl.max(value, 0))
        shrink = tl.exp(largest - now)
        share = tl.exp(value - now)
        total = total * shrink + tl.sum(share, 0)
        weighted = weighted * shrink + tl.sum(share * tl.where(inside, value, 0.0), 0)  # not 0 times infinity
        largest = now
    log_z = largest + tl.log(total)
    chosen = tl.load(logits + row * stride + tl.load(target + row))
    tl.store(logprob + row, chosen - log_z)
    tl.store(entropy + row, log_z - weighted / total)
    tl.store(logz + row, log_z)


@triton.jit
def write(
    logits, target, logz, entropy, grad_logprob, grad_entropy, grad, num_words, stride,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    log_z = tl.load(logz + row)
    chosen = tl.load(target + row)
    slope = tl.load(grad_logprob + row)
    bend = tl.load(grad_entropy + row)
    height = tl.load(entropy + row)
    for start in range(0, num_words, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = words < num_words
        log_p = tl.load(logits + row * stride + words, mask=inside, other=0.0) - log_z
        p = tl.exp(log_p)
        found = -slope * p
        if HAS_ENTROPY:
            found -= bend * p * (log_p + height)
        found = tl.where(words == chosen, found + slope, found)
        tl.store(grad + row * num_words + words, found.to(grad.dtype.element_ty), mask=inside)
