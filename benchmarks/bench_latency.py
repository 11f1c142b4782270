"""Milliseconds for one sentence in a warm process, as in a service that answers one at a time.

    python benchmarks/bench_latency.py
    python benchmarks/bench_latency.py --quick

Every round sends each contender the same sentences, one call each. A figure is the median over the
sentences of a round; the table has the median, least and largest of the rounds.
"""

import numpy as np
from peers import CONTENDERS, FEW, OURS
from side_by_side import Group, parse_options, print_machine, print_results, print_targets
from workloads import model_folder, short_sentences

F32, BF16 = OURS["float32"], OURS["bfloat16"]
TARGETS = [
    (F32, 1.0, "  its OpenVINO backend f32"),
    (BF16, 1.0, "  its OpenVINO backend bf16"),
    (F32, 1.0, "sentence-transformers f32"),
]


def main():
    options = parse_options(__doc__, rounds=9)
    sentences = short_sentences(20 if options.quick else 100)
    print_machine()
    folder = model_folder(options.model)
    with Group(folder, FEW if options.quick else CONTENDERS) as group:
        agreement = group.compare(sentences)
        one_each = [([sentence],) for sentence in sentences]
        group.take_turns(one_each, 1)  # single sentences take other paths than many: warm those up
        seconds, _ = group.take_turns(one_each, options.rounds)
    median = {name: np.median(rounds, axis=1) for name, rounds in seconds.items()}
    slow = {name: np.quantile(rounds, 0.95, axis=1) for name, rounds in seconds.items()}
    print(f"\none sentence at a time, {len(sentences)} sentences: the median sentence")
    print_results(group, median, agreement, unit="ms")
    print_targets(median, TARGETS)
    print("\nthe same: one of the slowest 5 % of the sentences")
    print_results(group, slow, agreement, unit="ms")


if __name__ == "__main__":
    main()
