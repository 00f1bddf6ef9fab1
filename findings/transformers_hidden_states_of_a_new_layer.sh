#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.13.0: a layer that is replaced after a model has once returned hidden states is left
# out of them from then on, without a word: a model of three layers returns three hidden states where it returned four,
# and what is read by its number is that of another layer. The first call registers a hook at each layer and notes on
# the model that this is done; a new layer gets none. Replaced before the first call, all four come back. Who prunes
# layers, quantizes them one by one, puts adapters around them or compares heads does this.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cat >"$folder/show.py" <<'P'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM


def hidden_states(called_before):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=3, vocab_size=32)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    tokens = torch.arange(6)[None]
    if called_before:
        model(tokens, output_hidden_states=True)
    layers = model.model.layers
    layers[1] = type(layers[1])(model.config, 1)
    return len(model(tokens, output_hidden_states=True).hidden_states)


found = [hidden_states(before) for before in (False, True)]
print(transformers.__version__, torch.__version__)
print('hidden states, of 3 layers and their input; a layer replaced before the first call:', found[0])
print('and after it:', found[1])
sys.exit(found != [4, 3])
P
"$folder/env/bin/python" -W ignore "$folder/show.py"
