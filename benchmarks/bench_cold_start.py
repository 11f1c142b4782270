"""Seconds from a new process to its first prediction, and where they go.

    python benchmarks/bench_cold_start.py
    python benchmarks/bench_cold_start.py --quick

Whole processes are timed from outside, start and end of Python included, and take turns. The floor
is a process that imports torch and transformers' BERT and does nothing else: nobody who runs a
BERT with them can be faster. The files are in the memory of the system, as after a first start.
"""

import json
import os
import pickle
import subprocess
import sys
import time

import joblib
import numpy as np
from side_by_side import parse_options, print_machine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from workloads import model_folder, new_folder

from sklearn_bert import BertLayerFeaturizer
from sklearn_bert.datasets import load_sentence_polarity

ALLOWED = 0.5  # seconds beyond the floor
FLOOR = "import torch; from transformers import BertModel"
OURS = """
import pickle, sys
with open(sys.argv[1] + "/pipeline.pkl", "rb") as file:
    pipeline = pickle.load(file)
print(pipeline.predict_proba(["a gripping film"])[0, 1])
"""
NAIVE = """
import sys
import joblib
import torch
from transformers import AutoTokenizer, BertModel
head = joblib.load(sys.argv[1] + "/head.joblib")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
model = BertModel.from_pretrained(sys.argv[2]).eval()
with torch.inference_mode():
    states = model(**tokenizer(["a gripping film"], return_tensors="pt")).last_hidden_state
print(head.predict_proba(states.mean(1).numpy())[0, 1])
"""
SENTENCE_TRANSFORMERS = """
import sys
import joblib
from sentence_transformers import SentenceTransformer
head = joblib.load(sys.argv[1] + "/head.joblib")
model = SentenceTransformer(sys.argv[2], device="cpu")
print(head.predict_proba(model.encode(["a gripping film"]))[0, 1])
"""
PROCESSES = {
    "import torch, BertModel: the floor": FLOOR,
    "sklearn_bert pipeline": OURS,
    "transformers by hand": NAIVE,
    "sentence-transformers": SENTENCE_TRANSFORMERS,
}
# the same as OURS, step by step, with a clock
STEPS = """
import json, sys, time
seconds, last = {}, time.perf_counter()
def step(name):
    global last
    now = time.perf_counter()
    seconds[name], last = now - last, now
import pickle
import sklearn.linear_model, sklearn.pipeline
step("import scikit-learn")
import sklearn_bert
sklearn_bert.BertLayerFeaturizer
step("import sklearn_bert")
with open(sys.argv[1] + "/pipeline.pkl", "rb") as file:
    pipeline = pickle.load(file)
step("unpickle")
import torch
step("import torch")
from transformers import BertModel
step("import transformers' BERT")
pipeline.predict_proba(["a gripping film"])
step("load the model, first prediction")
pipeline.predict_proba(["a gripping film, and then some"])
step("(a second prediction)")
print(json.dumps(seconds))
"""


def fit_pipeline(folder, home):
    """Write a fitted pipeline, and its classifier alone for those who compute features by hand."""
    corpus = load_sentence_polarity()
    pipeline = make_pipeline(
        BertLayerFeaturizer(folder, device="cpu"), LogisticRegression(max_iter=1000)
    )
    pipeline.fit(corpus.data[:200], corpus.target[:200])
    (home / "pipeline.pkl").write_bytes(pickle.dumps(pipeline))
    joblib.dump(pipeline[-1], home / "head.joblib")


def run(code, home, folder):
    """Run a process; return its seconds and the last line that it printed, None if it failed."""
    # let Python keep what it compiled, as for installed packages
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(home), folder],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        return seconds, None
    return seconds, (done.stdout.splitlines() or [""])[-1]


def check_agreement(home, folder):
    """Run each once, which also brings the files into memory, and compare what they predict."""
    ours = float(run(OURS, home, folder)[1])
    names = []
    for name, code in PROCESSES.items():
        printed = run(code, home, folder)[1]
        if printed is None:
            print(f"{name:36s}  skipped: it failed")
        elif code != FLOOR and not abs(float(printed) - ours) < 1e-4:
            print(f"{name:36s}  skipped: it predicts {printed}, not {ours}")
        else:
            names.append(name)
    return names


def take_turns(names, home, folder, n_rounds):
    seconds, steps = {name: [] for name in names}, []
    for number in range(n_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(run(PROCESSES[name], home, folder)[0])
        steps.append(json.loads(run(STEPS, home, folder)[1]))
    return {name: np.array(rounds) for name, rounds in seconds.items()}, steps


def print_table(seconds, steps):
    floor_name, ours_name = list(PROCESSES)[:2]
    floor, ours = seconds[floor_name], seconds[ours_name]
    print(f"\n{'':36s}{'median s':>10s}{'min':>8s}{'max':>8s}{'x ours':>8s}{'beyond floor':>14s}")
    for name, rounds in seconds.items():
        beyond = np.median(rounds - floor)
        print(
            f"{name:36s}{np.median(rounds):10.2f}{rounds.min():8.2f}{rounds.max():8.2f}"
            f"{np.median(rounds / ours):8.2f}{beyond:14.2f}"
        )
    beyond = np.median(ours - floor)
    verdict = "reached" if beyond <= ALLOWED else "MISSED"
    print(f"  within {ALLOWED} s of the floor: {beyond:.2f}, {verdict}")
    print("\nthe steps of the sklearn_bert pipeline, seconds (without start and end of Python)")
    for name in steps[0]:
        print(f"  {name:34s}{np.median([step[name] for step in steps]):10.3f}")


def main():
    options = parse_options(__doc__, rounds=9)
    print_machine()
    folder, home = model_folder(options.model), new_folder()
    fit_pipeline(folder, home)
    names = check_agreement(home, folder)
    print_table(*take_turns(names, home, folder, options.rounds))


if __name__ == "__main__":
    main()
