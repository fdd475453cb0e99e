"""Fields of OpenAI's and of other servers that would change an answer, and that we do not have.

They are refused unless they ask for what happens anyway. All others that we do not know are ignored: clients send many.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.errors import InvalidRequest

Neutral = tuple[Any, ...]  # values that ask for nothing, beside those of ABSENT

ABSENT: Neutral = (None, "", [], {})


def _all(names: str, *neutral: Any) -> dict[str, Neutral]:
    return dict.fromkeys(names.split(), neutral)


FOREIGN: Mapping[str, Neutral] = {
    # What the text may be
    **_all("guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern structured_outputs structural_tag", False),
    **_all("json_schema regex ebnf grammar stop_regex", False),
    **_all("bad_words bad_words_ids banned_tokens banned_strings custom_token_bans suppress_tokens begin_suppress_tokens", False),
    **_all("allowed_token_ids allowed_tokens force_words_ids logits_processors custom_logit_processor watermark", False),
    # How tokens are chosen
    **_all("typical_p typical typ_p tfs tfs_z", 1),
    **_all("top_a mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range smoothing_factor", 0),
    **_all("epsilon_cutoff eta_cutoff penalty_alpha no_repeat_ngram_size min_keep", 0),
    **_all("top_n_sigma nsigma", 0, -1),
    **_all("repeat_penalty rep_pen encoder_repetition_penalty guidance_scale cfg_scale", 1, 0),
    **_all("repetition_penalty_range rep_pen_range repetition_context_size repetition_decay", 0, -1),
    **_all("samplers sampler_priority sampler_order negative_prompt repetition_detection", False),
    **_all("temperature_last", False),
    **_all("adaptive_target", -1),
    **_all("do_sample", True),
    # Beams
    **_all("use_beam_search early_stopping", False),
    **_all("num_beams num_beam_groups beam_width length_penalty", 1),
    **_all("diversity_penalty beam_search_diversity_rate", 0),
    # How long it is, and what of it is told
    **_all("max_new_tokens max_length n_predict num_predict t_max_predict_ms max_output_tokens max_tokens_to_sample", -1),
    **_all("stop_sequences stop_sequence stop_strings eos_token_id", False),
    **_all("min_new_tokens min_length", 0, -1),
    **_all("ban_eos_token", False),
    **_all("enable_thinking thinking thinking_budget thinking_token_budget max_reasoning_tokens"),
    **_all("thinking_budget_tokens reasoning_budget reasoning_budget_tokens", -1),
    **_all("include_stop_str_in_output no_stop_trim prompt_logprobs", False),
    **_all("include_reasoning separate_reasoning stream_reasoning", True),
    # What the prompt is
    **_all("chat_template documents prompt_embeds truncate_prompt_tokens", False),
    # What OpenAI's models can besides, or could once
    **_all("functions suffix", False),
    "function_call": ("none", "auto"),
    **_all("audio modalities web_search_options", False, ["text"]),
}

# What only says how one of the above works changes nothing without it: dry_base, mirostat_tau, xtc_threshold and so on are ignored.
# So is repeat_last_n, but where one of our own penalties would look at fewer tokens:
WINDOW = "repeat_last_n"
PENALTIES: Mapping[str, float] = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}

BY_ENDPOINT: Mapping[str, Mapping[str, Neutral]] = {  # by the field that holds its prompt
    "messages": {**FOREIGN, **_all("echo add_special_tokens", False), "best_of": (1, 0)},
    "prompt": {**FOREIGN, "add_special_tokens": (True,), "tools": ()},
}

HINTS = {
    "enable_thinking": "set it in chat_template_kwargs",
    "max_new_tokens": "set max_tokens",
    "max_length": "set max_tokens",
    "n_predict": "set max_tokens",
    "num_predict": "set max_tokens",
    "min_new_tokens": "set min_tokens",
    "min_length": "set min_tokens",
    "max_output_tokens": "set max_tokens",
    "max_tokens_to_sample": "set max_tokens",
    "stop_sequences": "set stop",
    "stop_sequence": "set stop",
    "stop_strings": "set stop",
    "eos_token_id": "set stop_token_ids",
    "ban_eos_token": "set ignore_eos",
    "do_sample": "set temperature to 0",
    "repeat_penalty": "set repetition_penalty",
    "rep_pen": "set repetition_penalty",
}


def refuse_foreign(body: Mapping[str, Any], prompt_field: str) -> None:
    """prompt_field: of the endpoint. Raises InvalidRequest, naming the field."""
    foreign = BY_ENDPOINT[prompt_field]
    for field in sorted(foreign.keys() & body.keys()):
        if not _is_one_of(body[field], (*ABSENT, *foreign[field])):
            hint = f": {HINTS[field]}" if field in HINTS else ""
            raise InvalidRequest(f"{field} is not supported{hint}", field, "unsupported_value")
    penalised = any(not _is_one_of(body.get(field), (None, neutral)) for field, neutral in PENALTIES.items())
    if penalised and not _is_one_of(body.get(WINDOW), (None, -1)):
        raise InvalidRequest(f"{WINDOW} is not supported: penalties look at all tokens", WINDOW, "unsupported_value")


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """In JSON, where 1 and 1.0 are equal and 0 and false are not."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)
