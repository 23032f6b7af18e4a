"""`generate()`: every way to get the same tokens gives the same tokens."""

import pytest
import torch

from seqmix.model import CACHE_NAME, SeqmixCache
from tests.model.models import CROPPABLE, MODELS, model, tokens

GREEDY = {
    "do_sample": False,
    "max_new_tokens": 32,
    "pad_token_id": 0,
    "suppress_tokens": [0, 2],  # no end; and a drawn pad token would be taken for padding
}


@pytest.mark.parametrize("name", MODELS)
def test_padded_prompts_give_the_tokens_of_single_prompts(name):
    made, prompts = model(name), [tokens(1, n) for n in (3, 9, 17)]
    ids, mask = torch.zeros(3, 17, dtype=torch.long), torch.zeros(3, 17, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, 17 - prompt.shape[1] :], mask[i, 17 - prompt.shape[1] :] = prompt, 1
    together = made.generate(ids, attention_mask=mask, **GREEDY)[:, 17:]
    for i, prompt in enumerate(prompts):
        alone = made.generate(prompt, **GREEDY)[:, prompt.shape[1] :]
        assert together[i].tolist() == alone[0].tolist()
    again = made.generate(ids, attention_mask=mask, use_cache=False, **GREEDY)[:, 17:]
    assert together.tolist() == again.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_beams_are_reordered_like_recomputed_ones(name):
    made, prompt = model(name), tokens(2, 6)
    rules = {
        "num_beams": 4,
        "max_new_tokens": 10,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    cached, recomputed = (made.generate(prompt, use_cache=use, **rules) for use in (True, False))
    assert cached.sequences.tolist() == recomputed.sequences.tolist()
    torch.testing.assert_close(
        cached.sequences_scores, recomputed.sequences_scores, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["path_fox", "palimpsa_d", "lattice_4", "hybrid_m"])
def test_a_returned_cache_goes_on(name):
    made, prompt = model(name), tokens(2, 5)
    whole = made.generate(prompt, **GREEDY)
    rules = GREEDY | {"max_new_tokens": 12}
    first = made.generate(prompt, return_dict_in_generate=True, **rules)
    cache = getattr(first, CACHE_NAME)
    assert isinstance(cache, SeqmixCache)
    assert cache.get_seq_length() == 5 + 12 - 1  # the last token is drawn but not read
    rules = GREEDY | {"max_new_tokens": 20}
    assert made.generate(first.sequences, **{CACHE_NAME: cache}, **rules).tolist() == whole.tolist()


@pytest.mark.parametrize("name", ["path_fox", "palimpsa_m", "lattice_4", "rope"])
def test_a_dialogue_goes_on_with_several_tokens(name):
    made, prompt, reply = model(name), tokens(1, 8), tokens(1, 6)
    first = made.generate(prompt, return_dict_in_generate=True, **GREEDY)
    ids = torch.cat([first.sequences, reply], 1)
    cache = getattr(first, CACHE_NAME)
    warm = made.generate(ids, **{CACHE_NAME: cache.copy()}, **GREEDY)
    assert warm.tolist() == made.generate(ids, **GREEDY).tolist()
    pieces = made.generate(ids, prefill_chunk_size=7, **GREEDY)
    assert pieces.tolist() == warm.tolist()


def test_sampling_needs_no_cache_to_draw_the_same():
    made, prompt = model("hybrid"), tokens(2, 5)
    draws = []
    for use in (True, False):
        torch.manual_seed(1)
        rules = GREEDY | {"do_sample": True, "top_k": 5, "num_return_sequences": 2}
        draws.append(made.generate(prompt, use_cache=use, **rules).tolist())
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]


def test_without_a_cache_everything_is_computed_again():
    made, prompt, lengths = model("path"), tokens(1, 5), []
    hook = made.model.register_forward_hook(
        lambda module, args, kwargs, out: lengths.append(out[0].shape[1]), with_kwargs=True
    )
    rules = GREEDY | {"max_new_tokens": 4, "return_dict_in_generate": True}
    outputs = made.generate(prompt, use_cache=False, **rules)
    assert lengths == [5, 6, 7, 8] and getattr(outputs, CACHE_NAME) is None
    lengths.clear()
    made.generate(prompt, **rules)
    hook.remove()
    assert lengths == [5, 1, 1, 1]


def test_generation_reads_only_the_last_logits():
    made, shapes = model("path"), []
    hook = made.lm_head.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    made.generate(tokens(2, 9), **GREEDY | {"max_new_tokens": 2})
    hook.remove()
    assert shapes == [(2, 1, 31)] * 2


@pytest.mark.parametrize("name", ["palimpsa_d", "lattice_1", "hybrid"])
def test_assisted_decoding_is_refused_where_tokens_cannot_be_taken_back(name):
    made = model(name)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        made.generate(tokens(1, 5), prompt_lookup_num_tokens=3, **GREEDY)


@pytest.mark.parametrize("name", [*CROPPABLE, "path", "path_fox"])
def test_assisted_decoding_is_exact_where_it_is_allowed(name):
    made, prompt = model(name), tokens(1, 4).repeat(1, 20)
    rules = GREEDY | {"max_new_tokens": 80}
    expected = made.generate(prompt, **rules)
    looked_up = made.generate(prompt, prompt_lookup_num_tokens=3, **rules)
    assert looked_up[:, :160].tolist() == expected.tolist()  # 5.5 may draft one token too many
    helper = model("fox")
    helper.generation_config.num_assistant_tokens = 4
    drafted = made.generate(prompt, assistant_model=helper, **rules)
    assert drafted.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["path", "palimpsa_d", "lattice_4"])
def test_only_keys_and_values_draft(name):
    made, helper = model("rope"), model(name)
    with pytest.raises(ValueError, match="only attention and fox layers can draft"):
        made.generate(tokens(1, 5), assistant_model=helper, **GREEDY)


def test_another_cache_implementation_is_refused():
    with pytest.raises(ValueError, match="cache_implementation must be None, got 'static'"):
        model("path").generate(tokens(1, 3), cache_implementation="static", **GREEDY)
