"""Whether generated code reaches its tests as the model wrote it.

lm-eval decodes as the tokenizer's configuration says. With `clean_up_tokenization_spaces`, which
Llama 3's sets, transformers 5.0.0 to 5.6.2 make `','.join(x)` of `' , '.join(x)`; from 5.7 on, only
of tokenizers other than BPE.
"""

import logging
from typing import Any

import transformers

SPACED = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're k"  # each place that a clean-up changes
LOADING = ("revision", "subfolder", "gguf_file", "trust_remote_code")
READ = (None, "", "huggingface", "auto")  # kinds of tokenizers

log = logging.getLogger(__name__)


def check(
    pretrained: Any = None, tokenizer: Any = None, tokenizer_backend: Any = None, **model: Any
) -> None:
    """End the program with one line if the model's tokenizer removes spaces or cannot be loaded.

    The arguments are `--model_args`; a model made in Python has none, and is not checked.
    """
    if (chosen := tokenizer or pretrained) is None:
        return
    if tokenizer_backend not in READ:
        log.warning("whether a tokenizer of %s keeps code as it is was not looked at: only those "
                    "of transformers clean up", tokenizer_backend)  # fmt: skip
        return
    name = getattr(chosen, "name_or_path", chosen)  # a model or a tokenizer, made in Python
    if not isinstance(chosen, transformers.PreTrainedTokenizerBase):
        given = {key: model[key] for key in LOADING if key in model}
        if "use_fast_tokenizer" in model and "gguf_file" not in model:  # as lm-eval does
            given["use_fast"] = model["use_fast_tokenizer"]
        try:
            chosen = transformers.AutoTokenizer.from_pretrained(name, **given)
        except Exception as error:  # no such folder, a library that is missing, foreign code
            said = " ".join(str(error).split()) or type(error).__name__
            raise SystemExit(
                f"the tokenizer of {name} cannot be loaded, to see whether it keeps generated code "
                f"as it is: {said:.300}"
            ) from error
    tokens = chosen(SPACED)["input_ids"]
    if chosen.decode(tokens) != chosen.decode(tokens, clean_up_tokenization_spaces=False):
        raise SystemExit(
            f"the tokenizer of {name} takes spaces out of generated code, with transformers"
            f' {transformers.__version__}: pip install "transformers>=5.7", or set'
            ' "clean_up_tokenization_spaces": false in its tokenizer_config.json'
        )
