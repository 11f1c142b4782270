"""Time per token and peak memory from a thousand texts to a hundred thousand.

    python benchmarks/bench_scale.py                  # about three quarters of an hour
    python benchmarks/bench_scale.py --quick
    python benchmarks/bench_scale.py --dtype bfloat16

Each number of texts has a process of its own, so that memory one left behind is not another's.
Memory is sampled from outside: the most that a call held beyond what the process held before it,
with and without the result itself. Pages of files do not count: those of the weights are read when
a call first needs them, and the system takes them back when it likes. Every batch has another
number of tokens, so this also shows what is kept for shapes that were met, which must not grow with
the texts.
"""

import threading

import numpy as np
import psutil
from peers import Remote, load_sklearn_bert
from side_by_side import parse_options, print_machine
from workloads import MAX_LENGTH, count_tokens, distinct_sentences, model_folder, read_config

SIZES = (1_000, 10_000, 100_000)
QUICK_SIZES = (200, 2_000)


def load_on_texts(folder, n_texts, dtype):
    """Return a function that transforms texts the process already has."""
    transform = load_sklearn_bert(folder, MAX_LENGTH, dtype)
    texts = distinct_sentences(n_texts)
    transform(texts[:200])

    def run():
        transform(texts)  # the result is dropped here: sending it is not what is measured

    return run


class PeakMemory:
    """The most memory of another process that no file stands behind, sampled every 5 ms."""

    def __init__(self, pid):
        self.process = psutil.Process(pid)

    def __enter__(self):
        self.before = self.peak = self._bytes()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()

    def _sample(self):
        while not self.is_over.wait(0.005):
            self.peak = max(self.peak, self._bytes())

    def _bytes(self):
        memory = self.process.memory_info()
        return memory.rss - getattr(memory, "shared", 0)  # which macOS does not tell


def check_parts_agree(folder, texts, dtype):
    """Many texts in one call must have the features of few, bit for bit."""
    remote = Remote(load_sklearn_bert, folder, MAX_LENGTH, dtype)
    remote.wait_until_loaded()
    together = remote.call(texts)
    apart = np.concatenate([remote.call(texts[i : i + 50]) for i in range(0, len(texts), 50)])
    remote.stop()
    if not np.array_equal(together, apart):
        raise SystemExit("features depend on how many texts there are; times would mean nothing")


def measure(remotes, n_rounds):
    """Seconds of each round by size, and memory beyond before in the first call by size."""
    seconds, memory = {size: [] for size in remotes}, {}
    for number in range(n_rounds):
        for size, remote in remotes.items():
            with PeakMemory(remote.process.pid) as peak:
                seconds[size] += remote.time([()])
            if number == 0:
                memory[size] = peak.peak - peak.before
    return seconds, memory


def main():
    options = parse_options(__doc__, rounds=5, dtype="float32 (default) or bfloat16")
    dtype = options.dtype or "float32"
    sizes = QUICK_SIZES if options.quick else SIZES
    print_machine()
    folder = model_folder(options.model)
    check_parts_agree(folder, distinct_sentences(300), dtype)
    remotes = {size: Remote(load_on_texts, folder, size, dtype) for size in sizes}
    for remote in remotes.values():
        remote.wait_until_loaded()
    seconds, memory = measure(remotes, options.rounds)
    hidden_size = read_config(folder)["hidden_size"]
    print(
        f"\n{'texts':>8s}{'tokens':>10s}{'median s':>10s}{'min':>9s}{'max':>9s}{'us/token':>10s}"
        f"{'x first':>9s}{'peak MB':>9s}{'result':>8s}{'beyond':>8s}"
    )
    per_token, beyond = {}, {}
    for size in sizes:
        n_tokens = int(count_tokens(distinct_sentences(size), folder).sum())
        per_token[size] = np.median(seconds[size]) / n_tokens
        result, peak = size * hidden_size * 4 / 1e6, memory[size] / 1e6
        beyond[size] = peak - result
        print(
            f"{size:8d}{n_tokens:10d}{np.median(seconds[size]):10.2f}{min(seconds[size]):9.2f}"
            f"{max(seconds[size]):9.2f}{1e6 * per_token[size]:10.1f}"
            f"{per_token[size] / per_token[sizes[0]]:9.2f}"
            f"{peak:9.0f}{result:8.0f}{beyond[size]:8.0f}"
        )
    worst = max(abs(per_token[size] / per_token[sizes[0]] - 1) for size in sizes)
    print(f"  time per token constant: within {worst:.0%} of the fewest texts")
    growth = max(beyond.values()) - beyond[sizes[0]]
    print(f"  memory beyond the result: at most {growth:.0f} MB more than with the fewest texts")
    for remote in remotes.values():
        remote.stop()


if __name__ == "__main__":
    main()
