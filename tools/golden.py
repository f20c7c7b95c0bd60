#!/usr/bin/env python3
"""Compares checkpoint folders with the reference outputs in them: a row per folder, set of outputs, dtype of
activations and tensor-parallel size; and, where it is asked for, the perplexity of each model that has a
tokenizer. The folders may lie anywhere.

  bazel build //tools:lockstep //worker:lockstep_worker
  tools/golden.py tests/testdata/*/ --perplexity tests/testdata/qwen3_5-trained-text/perplexity.json

A folder's tensor-parallel sizes that are not legal are told and are no failure. Digests of a folder's rows
that differ in the tensor-parallel size alone must be equal. Exit code 5 when anything is out of bounds.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

WITHIN, OUT_OF_BOUNDS = 0, 5
ROW = "{:<36} {:<11} {:<4} {:>2}  {:>5} {:>10} {:>10}  {:>9}  {:>12}  {:<16}  {}"


def lockstep(options, *arguments):
    """Lines of JSON, stderr and the exit code of a run of the command line."""
    command = [options.lockstep, "eval", *arguments, "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr.strip(), done.returncode


def golden_rows(options, folder, activations, tp):
    """Prints the rows of one run. Returns {set: digests of its prompts} and whether all is well."""
    lines, errors, code = lockstep(
        options, "golden", "--model", str(folder), "--tp", str(tp), "--activations", activations)
    if code not in (WITHIN, OUT_OF_BOUNDS):
        illegal = re.search(r"is not legal .*(legal: [0-9, ]+)", errors)
        told = f"not legal; {illegal.group(1)}" if illegal else errors
        print(f"{folder.name:<36} {'':<11} {activations:<4} {tp:>2}  {told}", flush=True)
        return {}, illegal is not None
    digests, good = {}, True
    for name in dict.fromkeys(line["set"] for line in lines):
        mine = [line for line in lines if line["set"] == name]
        prompts = [line for line in mine if "prompt" in line]
        linears = [line for line in mine if "linear" in line]
        equal = sum(line["bytes_differing"] + line["scales_differing"] == 0 for line in linears)
        summary = next(line for line in mine if "within_bounds" in line)
        digests[name] = [line["digest"] for line in prompts]
        good = good and summary["within_bounds"]
        print(ROW.format(
            folder.name, name, activations, tp, sum(line["rows"] for line in prompts),
            "{:.2e}".format(max(line["worst_relative_error"] for line in prompts)),
            "{:.2e}".format(summary["median_relative_error"]),
            "{}/{}".format(sum(line["tokens_agreed"] for line in prompts),
                           sum(line["tokens_compared"] for line in prompts)),
            "{}/{}".format(equal, len(linears)) if linears else "-",
            digests[name][0], "ok" if summary["within_bounds"] else "OUT OF BOUNDS"), flush=True)
    if errors:
        print(errors, file=sys.stderr)
    return digests, good


def golden(options, folder):
    good = True
    for activations in options.activations.split(","):
        first = {}
        for tp in options.tp.split(","):
            digests, within = golden_rows(options, folder, activations, tp)
            good = good and within
            for name, mine in digests.items():
                if first.setdefault(name, mine) != mine:
                    print(f"{folder.name} {name} {activations}: digests at TP {tp} differ", flush=True)
                    good = False
    return good


def perplexity(options, folder, reference):
    """The reference's keys are "bf16" and "<format> weight_only"; a folder's name ends in its format."""
    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    for key, row in reference.items():
        form = key.split()[0]
        if not (folder.name.endswith("-" + form) if quantized else form == "bf16"):
            continue
        good = True
        for tp in options.tp.split(","):
            lines, errors, code = lockstep(
                options, "perplexity", "--model", str(folder), "--tp", tp, "--text",
                str(pathlib.Path(options.perplexity).parent / row["file"]), "--first-tokens",
                str(row["first_tokens"]), "--expected", repr(row["perplexity"]))
            result = errors
            if lines:
                result = "{perplexity:.6f} over {tokens} tokens, expected {expected:.6f}".format(**lines[0])
                result += "  ok" if code == WITHIN else "  OUT OF BOUNDS"
            print(f"{folder.name:<36} perplexity  f32  {tp:>2}  {result}", flush=True)
            good = good and code == WITHIN
        return good
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--tp", default="1,2,4", help="tensor-parallel sizes (default 1,2,4)")
    parser.add_argument("--activations", default="f32,bf16", help="default f32,bf16")
    parser.add_argument("--perplexity", help="perplexity.json, beside the text that it names")
    parser.add_argument("--lockstep", default="bazel-bin/tools/lockstep")
    options = parser.parse_args()
    reference = json.loads(pathlib.Path(options.perplexity).read_text()) if options.perplexity else {}
    good = True
    print(ROW.format("folder", "set", "act", "tp", "rows", "worst", "median", "tokens", "linears", "digest", ""))
    for folder in options.folders:
        if (folder / "golden.safetensors").exists():
            good = golden(options, folder) and good
        if (folder / "tokenizer.json").exists():
            good = perplexity(options, folder, reference) and good
    print("all within bounds" if good else "OUT OF BOUNDS")
    return WITHIN if good else OUT_OF_BOUNDS


if __name__ == "__main__":
    sys.exit(main())
