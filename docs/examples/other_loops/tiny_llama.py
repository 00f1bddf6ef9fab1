"""A tiny Llama and its tokenizer, made on the spot so that nothing has to be downloaded."""

import os
import string

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if 'FAKECARD_NAME' in os.environ:
    import fakecard_from_env  # noqa: F401  the stand-in of the tests, where there are no cards


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Each letter is a token."""
    names = ['<pad>', '<eos>', '<unk>', *string.ascii_lowercase]
    words = models.WordLevel({name: index for index, name in enumerate(names)}, unk_token='<unk>')
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='<pad>', eos_token='<eos>', unk_token='<unk>'
    )


def letters(rows: int) -> torch.Tensor:
    """Rows of twelve letters in the order of the alphabet, each from another one on."""
    first = torch.randint(26, (rows, 1), generator=torch.Generator().manual_seed(0))
    return 3 + (first + torch.arange(12)) % 26


def tiny_llama() -> LlamaForCausalLM:
    """Four layers of width 32; the same weights each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=29,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
