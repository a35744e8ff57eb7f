"""Time this project beside vLLM: plain and with one head, the same prompts, in turns.

    python experiments/beside_vllm.py --vllm=vllm/bin/python --base=DIR --draft=WORKDIR \\
        --exported=DIR [--trees=chain:4] [--threads=1] [--batch_size=1] [--rows=8] \\
        [--max_new_tokens=64] [--rounds=3]

`--exported` is the head as `convert --to=eagle_vllm` wrote it. Four processes are started, one for
each engine with the head and without, and one more for each further tree; all are held to the first
`--threads` cores. A round asks each of them in turn to decode all prompts; the first round compiles
and is not counted. Prints a row for each: the median of its rounds with the least and the most, and
how many texts equal those of vLLM without a head.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
VLLM_SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class Engine:
    """A process that decodes all prompts at each line that it is sent."""

    def __init__(self, command, asked, threads, results):
        cores = ",".join(map(str, range(threads)))
        self._results = results
        self._process = subprocess.Popen(
            ["taskset", "-c", cores, *command, str(results)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=results.with_suffix(".log").open("w"),
            env=os.environ | VLLM_SETTINGS | {"OMP_NUM_THREADS": str(threads)},
            text=True,
        )
        self._send(asked)

    def decode(self):
        """Return the seconds and the token ids of one round."""
        before = self._rounds()
        self._send("go")
        while len(rounds := self._rounds()) == len(before):
            try:
                self._process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            raise SystemExit(self._results.with_suffix(".log").read_text()[-3000:])
        return json.loads(rounds[-1])

    def _rounds(self):
        whole = self._results.read_text() if self._results.exists() else ""
        return whole.split("\n")[:-1]  # without a line that is being written

    def _send(self, value):
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def decode_here(results):
    """Decode with this project, as the worker of vLLM does with vLLM."""
    import time

    from clover_jax import api

    asked = json.loads(sys.stdin.readline())
    models = api.load_base(asked["model"], dtype="float32")
    if asked["draft"]:
        models = api.load_draft(
            models, asked["draft"], tree=asked["tree"], allow_base_mismatch=True
        )
    sampling = asked["sampling"]
    for _ in sys.stdin:
        started = time.perf_counter()
        rows = api.generate_rows(
            models,
            asked["prompts"],
            max_new_tokens=sampling["max_tokens"],
            temperature=sampling["temperature"],
            ignore_eos=sampling["ignore_eos"],
            batch_size=asked["batch_size"],
        )
        ids = [[row["output_ids"]] for row in sorted(rows, key=lambda row: row["index"])]
        seconds = time.perf_counter() - started
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps({"seconds": seconds, "output_ids": ids}) + "\n")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("vllm", "base", "draft", "exported"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--trees", default="chain:4", help="for this project, split at ';'")
    for name, default in (("threads", 1), ("batch_size", 1), ("rows", 8), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    return parser.parse_args()


def start(given, folder):
    """Return the engines by name; vLLM without a head is the first."""
    from clover_jax import api

    rows = (Path(given.base) / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(row)["prompt"] for row in rows[: given.rows]]
    tokenizer = api.load_base(given.base, dtype="float32").tokenizer
    asked = {
        "model": given.base,
        "prompts": [tokenizer(text)["input_ids"] for text in texts],
        "batch_size": given.batch_size,
        "sampling": {"temperature": 0.0, "max_tokens": given.max_new_tokens, "ignore_eos": True},
    }
    head = {"method": "eagle", "model": given.exported, "num_speculative_tokens": 4}
    theirs = [given.vllm, str(REPOSITORY / "tests/convert/vllm_worker.py")]
    ours = [sys.executable, __file__, "--worker"]
    commands = {
        "vLLM, plain": (theirs, {"speculative": None}),
        "vLLM, chain:4": (theirs, {"speculative": head}),
        "here, plain": (ours, {"draft": None}),
    }
    for tree in given.trees.split(";"):
        commands[f"here, {tree}"] = (ours, {"draft": given.draft, "tree": tree})
    return {
        name: Engine(command, asked | more, given.threads, folder / f"{number}.jsonl")
        for number, (name, (command, more)) in enumerate(commands.items())
    }


def main():
    given = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        engines = start(given, Path(folder))
        texts = {name: engine.decode()["output_ids"] for name, engine in engines.items()}
        seconds = {name: [] for name in engines}
        for _ in range(given.rounds):
            for name, engine in engines.items():
                seconds[name].append(engine.decode()["seconds"])
        for engine in engines.values():
            engine.close()

    reference = texts["vLLM, plain"]
    tokens = sum(len(ids) for (ids,) in reference)
    print("| engine | tokens/s | of vLLM plain | equal texts |\n| --- | --- | --- | --- |")
    plain = statistics.median(seconds["vLLM, plain"])
    for name, times in seconds.items():
        low, median, high = (tokens / f(times) for f in (max, statistics.median, min))
        equal = sum(a == b for a, b in zip(reference, texts[name], strict=True))
        speed = f"{median:.1f} ({low:.1f}-{high:.1f}) | {plain / statistics.median(times):.2f}"
        print(f"| {name} | {speed} | {equal} of {len(reference)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        decode_here(sys.argv[2])
    else:
        main()
