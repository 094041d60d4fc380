"""A tokenizer of transformers with one token per character, created here instead of downloaded."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
# Like ChatML: white space after the EOS, and a header that starts the assistant's answer.
CHATML = (
    "{% for m in messages %}@{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}@assistant\n{% endif %}"
)


def character_tokenizer(
    *, bos: bool = False, appends_eos: bool = False, eos: str | None = "</s>", template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character; `bos` and `appends_eos` select the special tokens that it adds."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *string.printable])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    if bos or appends_eos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{'<s> ' * bos}$A{' </s>' * appends_eos}", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token=eos, pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer
