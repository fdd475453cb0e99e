"""The model's tokenizer, from files that its worker handed on: read alike by whoever turns text into ids."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from shared.errors import ConfigError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """As transformers has it, but for what the files say of padding, truncation and blanks before punctuation: a prompt's ids are those
    of its text, no more, no less, and an answer's text is that of its ids.

    Raises ConfigError for files that are no tokenizer, or one of a kind that the installed packages do not know.
    """
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises the base class, transformers whatever a value of the wrong kind leads to
        raise ConfigError(f"the model's tokenizer files cannot be loaded: {error}") from error
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer
