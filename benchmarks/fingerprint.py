"""What a fingerprint costs next to one float32 sum() over the same bytes, and next to SHA-1.

Every figure is the median over interleaved pairs: A, B, A, B, ... so that both meet the same
noise. The same-against-same column is the ratio that the method gives for two identical runs:
differences below it mean nothing.

    OMP_NUM_THREADS=1 python benchmarks/fingerprint.py [--pairs N]
"""

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from sdcwatch.checks.fingerprint import combine, digest_tensor, digest_tensors, salt
from sdcwatch.checks.nonfinite import confirm_nonfinite, probe

Work = Callable[[], object]


def seconds(work: Work) -> float:
    begin = time.thread_time()  # CPU time: neighbours on a shared machine do not count
    work()
    return time.thread_time() - begin


def ratio(work: Work, base: Work, pairs: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median ratio of neighbours."""
    work(), base()
    samples = [(seconds(work), seconds(base)) for _ in range(pairs)]
    return (
        statistics.median(a for a, _ in samples),
        statistics.median(b for _, b in samples),
        statistics.median(a / b for a, b in samples),
    )


def report(name: str, work: Work, base: Work, pairs: int) -> None:
    took, base_took, times = ratio(work, base, pairs)
    _, _, noise = ratio(base, base, pairs)
    print(f"{name:52}{took * 1e6:12.0f}{base_took * 1e6:12.0f}{times:9.2f}{noise:9.2f}")


def gpt(layers: int, width: int, vocabulary: int) -> list[torch.Tensor]:
    """The parameters of a small GPT with tied embeddings: many small tensors."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (128, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width)]
        shapes += [(width,)]
    return [torch.randn(shape) for shape in [*shapes, (width,), (width,)]]


def sum_each(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.sum() for tensor in tensors]


def sha1_each(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [hashlib.sha1(memoryview(tensor.numpy())).digest() for tensor in tensors]


def one_tensor(pairs: int) -> None:
    for elements in (1 << 10, 1 << 17, 1 << 20, 1 << 22, 1 << 24):
        tensor = torch.randn(elements)
        name = f"digest_tensor, {elements} float32, against sum()"
        report(name, lambda t=tensor: digest_tensor(t), lambda t=tensor: t.sum(), pairs)
    words = torch.randn(1 << 25, dtype=torch.bfloat16)
    as_floats = words.view(torch.float32)
    name = f"digest_tensor, {1 << 25} bfloat16, against sum()"
    report(name, lambda: digest_tensor(words), lambda: as_floats.sum(), pairs)


def models(pairs: int) -> None:
    for tensors in (gpt(8, 192, 256), gpt(12, 768, 8192)):
        salts = tuple(salt(str(i), tensor) for i, tensor in enumerate(tensors))
        count, size = len(tensors), sum(t.numel() for t in tensors)
        of = f"{count} tensors, {size / 1e6:.1f} M"

        def model(t: list[torch.Tensor] = tensors, s: tuple[int, ...] = salts) -> torch.Tensor:
            return combine(digest_tensors(t), s)

        flat = torch.cat([t.view(-1) for t in tensors])
        report(f"model digest, {of}, against one sum()", model, flat.sum, pairs)
        report(
            f"model digest, {of}, against sum() each", model, lambda t=tensors: sum_each(t), pairs
        )
        report(
            f"SHA-1 per parameter, {of}, against ours", lambda t=tensors: sha1_each(t), model, pairs
        )
        report(
            f"one by one, {of}, against as a list",
            lambda t=tensors: [digest_tensor(x) for x in t],
            lambda t=tensors: digest_tensors(t),
            pairs,
        )


def probes(pairs: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(1 << 22).to(dtype)
        name = f"probe, {1 << 22} {str(dtype)[6:]}"
        base = torch.randn(tensor.numel() * tensor.element_size() // 4)
        report(f"{name}, against sum() of the bytes", lambda t=tensor: probe(t), base.sum, pairs)
        exact = f"exact answer, {1 << 22} {str(dtype)[6:]}, against the probe"
        report(exact, lambda t=tensor: confirm_nonfinite(t), lambda t=tensor: probe(t), pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=31, help="interleaved pairs per figure")
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, median of {pairs} pairs")
    print(f"{'':52}{'us':>12}{'base us':>12}{'ratio':>9}{'same':>9}")
    one_tensor(pairs)
    models(pairs)
    probes(pairs)


if __name__ == "__main__":
    main()
