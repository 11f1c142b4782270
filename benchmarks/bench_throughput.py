"""Texts per second against other libraries: short sentences, long reviews, BERT-base size.

    python benchmarks/bench_throughput.py                  # about 40 minutes
    python benchmarks/bench_throughput.py --quick          # a few minutes

All take turns in one run, each in its own process. Before anything is timed, the features of all
are compared with those of transformers' own model on the same texts.
"""

from peers import CONTENDERS, FEW, OURS
from side_by_side import (
    Group,
    parse_options,
    print_machine,
    print_results,
    print_roof_targets,
    print_targets,
)
from workloads import (
    count_tokens,
    long_reviews,
    model_flops,
    model_folder,
    random_bert_base,
    short_sentences,
)

F32, BF16 = OURS["float32"], OURS["bfloat16"]
PEER = "sentence-transformers f32"
OPENVINO_F32, OPENVINO_BF16 = "  its OpenVINO backend f32", "  its OpenVINO backend bf16"
# (ours, at least so many times faster, than whom); then (ours, at least this share of the roof)
SHORT = [(F32, 2.6, PEER), (F32, 1.2, OPENVINO_F32), (BF16, 4.2, PEER), (BF16, 1.2, OPENVINO_BF16)]
LONG = [(F32, 2.3, PEER), (F32, 1.05, OPENVINO_F32), (BF16, 3.8, PEER), (BF16, 1.05, OPENVINO_BF16)]
BASE = [(F32, 2.3, PEER), (BF16, 4.5, PEER)]
SHORT_ROOF, LONG_ROOF = [(F32, 0.75), (BF16, 0.6)], [(F32, 0.7), (BF16, 0.6)]


def bench(title, group, folder, texts, n_rounds, targets, roof_targets):
    n_tokens = count_tokens(texts, folder)
    flops = model_flops(n_tokens, group.config)
    agreement = group.compare(texts)
    seconds, roofs = group.take_turns([(texts,)], n_rounds)
    seconds = {name: rounds[:, 0] for name, rounds in seconds.items()}
    print(
        f"\n{title}: {len(texts)} texts, {n_tokens.sum()} tokens, {flops / 1e9:.1f} GFLOP; roof "
        + ", ".join(f"{roof / 1e9:.0f} GFLOP/s in {dtype}" for dtype, roof in roofs.items()),
    )
    print_results(group, seconds, agreement, roofs, flops)
    print_targets(seconds, targets, roofs, flops)
    print_roof_targets(seconds, roof_targets, roofs, flops)


def main():
    options = parse_options(
        __doc__,
        reviews="JSON lines with a 'text' each, for the long reviews",
        only="short, long or base",
    )
    n_short, n_long, n_base = (100, 5, 10) if options.quick else (1000, 100, 200)
    print_machine()
    if options.only != "base":
        folder = model_folder(options.model)
        with Group(folder) as group:
            if options.only != "long":
                texts = short_sentences(n_short)
                bench("short sentences", group, folder, texts, options.rounds, SHORT, SHORT_ROOF)
            for n_tokens in (256, 512) if options.only != "short" else ():
                texts = long_reviews(n_long, n_tokens, folder, options.reviews)
                title = f"reviews of {n_tokens} tokens"
                bench(title, group, folder, texts, options.rounds, LONG, LONG_ROOF)
    if options.only in (None, "base"):
        folder = random_bert_base()
        with Group(folder, FEW if options.quick else CONTENDERS) as group:
            texts = short_sentences(n_base)
            bench("12 x 768, random weights", group, folder, texts, options.rounds, BASE, [])


if __name__ == "__main__":
    main()
