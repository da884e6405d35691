"""What llama.cpp takes for a decode step of SmolLM2-135M, in Q8_0 and Q4_0, beside benchmarks/decode_llama.py.

The weights are those of benchmarks/norm_gates.py, stored again in other formats by the package gguf. llama.cpp comes
prebuilt with node-llama-cpp. From the root of the repository:

    mkdir llama && (cd llama && npm init -y && npm install node-llama-cpp)
    python benchmarks/llama_cpp.py smollm2 llama --output llama.json

Each step is one token at places 32 to 95, as there; times are medians, one format after the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import gguf

from blockgate.checkpoint.atomic import write_whole
from blockgate.lab.bench import machine

FORMATS = ("Q8_0", "Q4_0")

# Evaluates without sampling another token, so that a step is what one of ours is: the model, up to the logits.
STEPS = """
import {getLlama} from "node-llama-cpp";
const [file, threads, seconds] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 256, threads: +threads, flashAttention: false});
const sequence = context.getSequence();
const word = () => 100 + Math.floor(1000 * Math.random());
await sequence.evaluateWithoutGeneratingNewTokens(Array.from({length: 32}, word));
const times = [];
for (const end = performance.now() + 1000 * seconds; performance.now() < end;) {
  if (sequence.nextTokenIndex >= 96) await sequence.eraseContextTokenRanges([{start: 32, end: 96}]);
  const start = performance.now();
  await sequence.controlledEvaluate([[word(), {generateNext: {probabilities: false, confidence: true}}]]);
  times.push(performance.now() - start);
}
times.sort((a, b) => a - b);
console.log(JSON.stringify({
  "median": times[times.length >> 1], "fastest tenth": times[Math.floor(times.length / 10)], "steps": times.length,
}));
process.exit(0);
"""


def store_as(source: Path, target: Path, name: str) -> None:
    """Writes the model with all matrices in another format; the embedding, which is the output layer too, in Q8_0."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(values.shape) == 1:
            writer.add_tensor(tensor.name, values)
            continue
        kind = gguf.GGMLQuantizationType["Q8_0" if tensor.name == "token_embd.weight" else name]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Measures and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the GGUF file lies")
    parser.add_argument("node", type=Path, help="where node-llama-cpp is installed")
    parser.add_argument("--seconds", type=float, default=10, help="of timing for each (10)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (1 2)")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args()
    source = next(iter(sorted(chosen.folder.rglob("*.gguf"))))
    script = chosen.node / "steps.mjs"
    script.write_text(STEPS)
    package = json.loads((chosen.node / "node_modules/node-llama-cpp/package.json").read_text())
    found: dict[str, Any] = {"machine": machine.describe(), "node-llama-cpp": package["version"], "milliseconds": {}}
    for name in FORMATS:
        target = chosen.node / f"{name}.gguf"
        if not target.exists():
            store_as(source, target, name)
        for threads in chosen.threads:
            command = ["node", script.name, target.name, str(threads), str(chosen.seconds)]
            answer = subprocess.run(command, cwd=chosen.node, check=True, capture_output=True, text=True).stdout
            arm = found["milliseconds"].setdefault(f"{threads} threads", {})
            arm[f"llama.cpp {name}"] = json.loads(answer.strip().splitlines()[-1])
        found[f"bytes of {name}"] = target.stat().st_size
    write_whole(chosen.output, json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
