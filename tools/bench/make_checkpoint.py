#!/usr/bin/env python3
"""Writes a checkpoint of the geometry of Qwen3.5 dense 27B with random weights, to measure with.

    tools/bench/make_checkpoint.py --out /dev/shm/27b [--layers 64]

Formats are those of a mixed compressed-tensors release: NVFP4 for the MLPs of all but the last
eighth of the layers, FP8 per channel for everything else that is quantized, BF16 for embeddings and
small tensors. Values are random but finite, and small enough for activations to stay finite. There
is no tokenizer: the server takes token ids.
"""

import argparse
import json
import os
import random
import struct

HIDDEN, INNER, VOCAB = 5120, 17408, 248320
Q_HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
K_HEADS, V_HEADS, K_DIM, V_DIM, CONV = 16, 48, 128, 128, 4
SHARD_BYTES = 4 << 30
BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
PERIOD = 1 << 24  # random bytes repeat after this many, plus a prime shift per tensor


def linear(name, n, k, scheme):
    if scheme == "bf16":
        return [(name + ".weight", "BF16", [n, k], "weight")]
    if scheme == "fp8":
        return [
            (name + ".weight", "F8_E4M3", [n, k], "fp8"),
            (name + ".weight_scale", "BF16", [n, 1], "channel_scale"),
        ]
    return [
        (name + ".weight_packed", "U8", [n, k // 2], "bytes"),
        (name + ".weight_scale", "F8_E4M3", [n, k // 16], "block_scale"),
        (name + ".weight_global_scale", "F32", [1], "global"),
        (name + ".input_global_scale", "F32", [1], "one"),
    ]


def layer_type(i):
    return "full_attention" if i % 4 == 3 else "linear_attention"


def tensors(layers):
    out = [("model.embed_tokens.weight", "BF16", [VOCAB, HIDDEN], "weight")]
    for i in range(layers):
        p = "model.layers.%d." % i
        out.append((p + "input_layernorm.weight", "BF16", [HIDDEN], "norm"))
        if layer_type(i) == "full_attention":
            a = p + "self_attn."
            out += linear(a + "q_proj", 2 * Q_HEADS * HEAD_DIM, HIDDEN, "fp8")
            out += linear(a + "k_proj", KV_HEADS * HEAD_DIM, HIDDEN, "fp8")
            out += linear(a + "v_proj", KV_HEADS * HEAD_DIM, HIDDEN, "fp8")
            out += linear(a + "o_proj", HIDDEN, Q_HEADS * HEAD_DIM, "fp8")
            out.append((a + "q_norm.weight", "BF16", [HEAD_DIM], "norm"))
            out.append((a + "k_norm.weight", "BF16", [HEAD_DIM], "norm"))
        else:
            a = p + "linear_attn."
            channels = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
            out += linear(a + "in_proj_qkv", channels, HIDDEN, "fp8")
            out += linear(a + "in_proj_z", V_HEADS * V_DIM, HIDDEN, "fp8")
            out += linear(a + "in_proj_a", V_HEADS, HIDDEN, "bf16")
            out += linear(a + "in_proj_b", V_HEADS, HIDDEN, "bf16")
            out += linear(a + "out_proj", HIDDEN, V_HEADS * V_DIM, "fp8")
            out.append((a + "A_log", "BF16", [V_HEADS], "norm"))
            out.append((a + "dt_bias", "BF16", [V_HEADS], "norm"))
            out.append((a + "conv1d.weight", "BF16", [channels, 1, CONV], "norm"))
            out.append((a + "norm.weight", "BF16", [V_DIM], "norm"))
        out.append((p + "post_attention_layernorm.weight", "BF16", [HIDDEN], "norm"))
        mlp = "fp8" if i >= layers - layers // 8 else "nvfp4"
        out += linear(p + "mlp.gate_proj", INNER, HIDDEN, mlp)
        out += linear(p + "mlp.up_proj", INNER, HIDDEN, mlp)
        out += linear(p + "mlp.down_proj", HIDDEN, INNER, mlp)
    out.append(("model.norm.weight", "BF16", [HIDDEN], "norm"))
    return out + linear("lm_head", VOCAB, HIDDEN, "fp8")


def size_of(tensor):
    size = BYTES[tensor[1]]
    for d in tensor[2]:
        size *= d
    return size


class Values:
    """Runs of random bytes that are legal in each kind of tensor."""

    def __init__(self):
        noise = random.Random(7).randbytes(PERIOD)
        bf16 = bytearray(noise)
        for i in range(1, PERIOD, 2):  # sign, and magnitudes from 2^-7 to 2^-5
            bf16[i] = (noise[i] & 0x80) | 0x3C
        scales = bytearray(noise)
        for i in range(1, PERIOD, 2):  # 2^-13
            scales[i] = 0x39
        norms = bytearray(noise)
        for i in range(1, PERIOD, 2):  # around 2^-3
            norms[i] = 0x3E
        # E4M3: no NaN, and exponents that keep sums near one.
        fp8 = bytes((b & 0x80) | (0x28 + (b & 0x0F)) for b in noise)
        blocks = bytes(0x30 + (b & 0x07) for b in noise)
        self.runs = {
            "bytes": noise,
            "weight": bytes(bf16),
            "channel_scale": bytes(scales),
            "norm": bytes(norms),
            "fp8": fp8,
            "block_scale": blocks,
        }

    def write(self, file, kind, size):
        if kind == "one":
            file.write(struct.pack("<f", 1.0))
        elif kind == "global":  # compressed-tensors stores the divisor
            file.write(struct.pack("<f", 512.0))
        else:
            run = self.runs[kind]
            while size > 0:
                file.write(run[: min(size, PERIOD)])
                size -= PERIOD


def config(layers):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    weights4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False, "symmetric": True}
    inputs4 = dict(weights4, dynamic="local")
    last = "|".join(str(i) for i in range(layers - layers // 8, layers)) or "none"
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "layer_types": [layer_type(i) for i in range(layers)],
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "linear_num_key_heads": K_HEADS,
        "linear_num_value_heads": V_HEADS,
        "linear_key_head_dim": K_DIM,
        "linear_value_head_dim": V_DIM,
        "linear_conv_kernel_dim": CONV,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "eos_token_id": 248044,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "quantization_status": "compressed",
            "ignore": ["re:.*linear_attn\\.in_proj_[ab]$"],
            "config_groups": {
                "group_0": {
                    "format": "float-quantized",
                    "targets": [
                        "re:.*self_attn\\.(q|k|v|o)_proj$",
                        "re:.*linear_attn\\.(in_proj_qkv|in_proj_z|out_proj)$",
                        "lm_head",
                        "re:.*layers\\.(%s)\\.mlp\\.(gate|up|down)_proj$" % last,
                    ],
                    "weights": weights,
                    "input_activations": inputs,
                },
                "group_1": {
                    "format": "nvfp4-pack-quantized",
                    "targets": ["re:.*mlp\\.(gate|up|down)_proj$"],
                    "weights": weights4,
                    "input_activations": inputs4,
                },
            },
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write; about 21 GB with 64 layers")
    parser.add_argument("--layers", type=int, default=64)
    args = parser.parse_args()
    if args.layers < 8 or args.layers % 8:
        parser.error("--layers %d is no positive multiple of 8" % args.layers)
    os.makedirs(args.out, exist_ok=True)
    shards, size = [[]], 0
    for t in tensors(args.layers):
        if size + size_of(t) > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(t)
        size += size_of(t)
    values, index, total = Values(), {}, 0
    for i, shard in enumerate(shards):
        name = "model-%05d-of-%05d.safetensors" % (i + 1, len(shards))
        header, offset = {}, 0
        for t in shard:
            header[t[0]] = {"dtype": t[1], "shape": t[2], "data_offsets": [offset, offset + size_of(t)]}
            offset += size_of(t)
            index[t[0]] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(args.out, name), "wb") as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for t in shard:
                values.write(file, t[3], size_of(t))
        total += offset
    with open(os.path.join(args.out, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, file)
    with open(os.path.join(args.out, "config.json"), "w") as file:
        json.dump(config(args.layers), file, indent=1)
    print("%d tensors, %.3f GB in %s" % (len(index), total * 1e-9, args.out))


if __name__ == "__main__":
    main()
