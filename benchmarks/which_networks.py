"""Which networks of transformers, timm and torchvision become small: of every kind one, in a small size.

A kind is a type of model of transformers, or a module of timm or torchvision, of which two small networks are taken. It
has random weights and small sizes: of transformers its default configuration, in which sizes with usual names are set
to a few. An uneven part of each group of units is removed, and the slim network is compared with the masked one as law
8 says, by the code of `make test-long`: outputs, gradients and ten steps of two optimizers, in float64. What comes of
it:

    equal       they agree to 1e-10
    rounded     they agree to 1e-5, as the network computes in float32 whatever its type; or they differ by no more than
                the masked network's gradients move when the last digits of its weights change
    refused     rewound says in a sentence why not
    nothing     no units were found, or removing them changes no output
    different   they do not agree
    failed      anything else: an error of another kind, no end within 90 s of CPU time
    not made    the network needs other sizes or inputs than this script gives

    make test-long                          # once: installs timm and torchvision into .zoo
    PYTHONPATH=.zoo python benchmarks/which_networks.py ROWS.jsonl [--of transformers,timm,torchvision]

takes an hour on one core. A file with rows is gone on with; its counts are printed at the end.
"""

import argparse
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from architectures import IDS, Case
from rewound import InputError
from slim_and_masked import BOUND, compared, own_movement
from zoo import images, with_torchvision

LIMIT = 90  # seconds of CPU time for a network
MEMORY = 12 << 30
MOST = 6_000_000  # parameters; torchvision's and timm's may have ten times as many
SIZES = {
    16: "hidden_size d_model n_embd dim embed_dim hidden_dim encoder_hidden_size decoder_hidden_size embedding_size "
    "word_embed_proj_dim",
    20: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner",
    12: "moe_intermediate_size shared_expert_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads head_dim d_kv "
    "rotary_dim num_experts num_local_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "conv_kernel time_step_rank mamba_d_head mamba_chunk_size chunk_size",
    2: "num_hidden_layers n_layers n_layer num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers num_key_value_heads num_experts_per_tok type_vocab_size expand num_feature_levels n_groups "
    "mamba_expand",
    8: "kv_lora_rank q_lora_rank patch_size sliding_window state_size mamba_d_state mamba_n_heads",
    32: "max_position_embeddings n_positions image_size",
    99: "vocab_size",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
OTHERS: tuple[dict[str, int], ...] = ({}, {"num_key_value_heads": 4}, {"num_heads": 8})
"""Where a network does not run with these sizes: as many heads for keys as for queries, or as Mamba has them."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
HEADS = ("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification", "AudioClassification", "")


class NotMade(Exception):
    """This script does not know how to make a network, or what to give it."""


# transformers


def of_transformers(kind: str) -> Case:
    why = ""
    for others in OTHERS:
        try:
            return of_configuration(kind, others)
        except NotMade as error:
            why = str(error)
        except Exception as error:  # for sizes that do not go together
            why = f"{type(error).__name__}: {error}"
    raise NotMade(why)


def of_configuration(kind: str, others: dict[str, int]) -> Case:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    shrink(config, {**SMALL, **others})
    autos = [getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel") for head in HEADS]
    auto = next((auto for auto in autos if type(config) in auto._model_mapping), None)
    if auto is None:
        raise NotMade("no model for it alone")
    with torch.device("meta"):
        check_size(auto.from_config(config), MOST)
    try:
        model = auto.from_config(config, experts_implementation="batched_mm")  # others choose experts by their values
    except (TypeError, ValueError):
        model = auto.from_config(config)
    model = model.double().eval()
    return model, (), accepted(model, list(inputs_of_transformers(model, config)))


def shrink(config: Any, small: dict[str, int]) -> None:
    """Set the sizes of a configuration, and of those inside it, to a few."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value, small)
        elif "dropout" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name == "depths" and isinstance(value, list | tuple):
            setattr(config, name, [1] * len(value))
        elif name in ("hidden_sizes", "embed_dims") and isinstance(value, list | tuple):
            setattr(config, name, [8 * (place + 1) for place in range(len(value))])
        elif isinstance(value, int) and not isinstance(value, bool):
            with suppress(AttributeError, NotImplementedError, ValueError):
                setattr(config, name, small.get(name, TOKENS.get(name, value)))
    config.use_cache = False
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or [])):
        with suppress(AttributeError):
            config.layer_types = (kinds * 2)[: config.num_hidden_layers]


def inputs_of_transformers(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """What it may take, the likeliest first."""
    words = IDS + 3
    size = getattr(config, "image_size", 32)
    pictures = [images(each).double() for each in (size if isinstance(size, int) else size[0], 64)]
    sound = torch.linspace(-900, 900, 2 * 16_000).reshape(2, -1).sin().double()
    bins = getattr(config, "num_mel_bins", 16)
    by_name = {
        "pixel_values": [{"pixel_values": each} for each in pictures],
        "input_values": [{"input_values": sound}],
        "input_features": [
            {"input_features": sound[:, : bins * 64].reshape(2, bins, 64), "decoder_input_ids": words},
            {"input_features": sound[:, : bins * 64].reshape(2, 64, bins)},
        ],
    }
    yield from by_name.get(getattr(model, "main_input_name", ""), [])
    yield {"input_ids": words, "use_cache": False}
    yield {"input_ids": words}
    yield {"input_ids": words, "decoder_input_ids": words.flip(1), "use_cache": False}
    yield {"input_ids": words, "pixel_values": pictures[0], "attention_mask": torch.ones_like(words)}


@torch.no_grad()
def accepted(model: nn.Module, several: list[dict[str, Any]]) -> dict[str, Any]:
    """The first inputs that a model runs on."""
    why = ""
    for inputs in several:
        try:
            model(**inputs)
        except Exception as error:  # whatever its own code raises
            why = f"{type(error).__name__}: {error}"
        else:
            return inputs
    raise NotMade(why)


# timm and torchvision


def of_timm(name: str) -> Case:
    import timm

    def made(size: int, **options: int) -> Case:
        model = timm.create_model(name, pretrained=False, num_classes=5, **options)
        return model.double().eval(), (images(size).double(),), {}

    sizes = (64, 96, 128, 224)
    return first_that_runs([lambda s=s, o=o: made(s, **o) for s in sizes for o in ({"img_size": s}, {})])  # type: ignore[misc]


def of_torchvision(name: str) -> Case:
    from torchvision import models

    options = {} if name in models.list_models(models) else {"weights_backbone": None}

    def made(size: int) -> Case:
        return models.get_model(name, weights=None, **options).double().eval(), (images(size).double(),), {}

    return first_that_runs([lambda s=s: made(s) for s in (64, 96, 224)])  # type: ignore[misc]


@torch.no_grad()
def first_that_runs(several: list[Callable[[], Case]]) -> Case:
    why = ""
    for make in several:
        try:
            model, args, keywords = make()
            check_size(model, 10 * MOST)
            model(*args)
        except NotMade:
            raise
        except Exception as error:  # whatever its own code raises
            why = f"{type(error).__name__}: {error}"
        else:
            return model, args, keywords
    raise NotMade(why)


def check_size(model: nn.Module, most: int) -> None:
    if (count := sum(parameter.numel() for parameter in model.parameters())) > most:
        raise NotMade(f"it has {count:,} parameters")


# All of them

MAKERS: dict[str, Callable[[str], Case]] = {
    "transformers": of_transformers,
    "timm": of_timm,
    "torchvision": of_torchvision,
}


def kinds(library: str) -> list[str]:
    if library == "transformers":
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return list(CONFIG_MAPPING.keys())
    if library == "torchvision":
        from torchvision import models

        every = [*models.list_models(models), *models.list_models(models.segmentation)]
        return smallest_two(every, lambda name: models.get_model_builder(name).__module__)
    import timm

    return smallest_two(timm.list_models(), timm.models._registry._model_to_module.__getitem__)


def smallest_two(names: Iterable[str], module: Callable[[str], str]) -> list[str]:
    """Two networks of each module, by words in names that say that one is small: the first of all, then the second."""
    words = list(enumerate(("test_", "atto", "femto", "pico", "nano", "tiny", "_t", "small", "_xs", "_s", "18", "_b0")))
    modules = defaultdict[str, list[str]](list)
    for name in sorted(names, key=lambda n: next((place for place, word in words if word in n), len(words))):
        modules[module(name)].append(name)
    return [each[place] for place in range(2) for each in modules.values() if place < len(each)]


def row(library: str, name: str) -> dict[str, Any]:
    """What comes of one network."""
    start, found = time.perf_counter(), dict[str, Any](library=library, name=name)
    torch.manual_seed(0)
    try:
        case = MAKERS[library](name)
        found["class"] = type(case[0]).__name__
    except Exception as error:  # configurations raise all kinds for sizes that do not go together
        return {**found, "outcome": "not made", "why": f"{type(error).__name__}: {error}"[:400]}
    try:
        result = compared(case)
        off = result.difference
        is_rounding = off < 1e-5 or off < own_movement(MAKERS[library](name))
        outcome = "equal" if off < BOUND else "rounded" if is_rounding else "different"
        found |= {"outcome": outcome, "units": result.units, "groups": result.groups, "difference": off}
    except InputError as error:
        found |= {"outcome": "refused", "why": str(error)[:600]}
    except AssertionError as error:
        found |= {"outcome": "nothing" if "seen in the output" in str(error) else "failed", "why": str(error)[:400]}
    except Exception as error:  # what is to be found out
        found |= {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:400]}
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def apart(library: str, name: str) -> dict[str, Any]:
    """The same in a process of its own, which may crash or not end."""
    reading, writing = os.pipe()
    if not (process := os.fork()):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        os.write(writing, json.dumps(row(library, name)).encode())
        os._exit(0)
    os.close(writing)
    text = os.read(reading, 1 << 16)  # a row is written at once; nothing if the process ends before
    os.close(reading)
    _, status = os.waitpid(process, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    why = f"no end within {LIMIT} s of CPU time" if late else "it crashed"
    return {"library": library, "name": name, "outcome": "failed", "why": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--of", default=",".join(MAKERS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with_torchvision()  # before transformers looks for it
    torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))  # imports once what all processes need
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    known = {(each["library"], each["name"]) for each in rows}
    with options.rows.open("a") as file:
        for library in options.of.split(","):
            for name in kinds(library):
                if (library, name) not in known:
                    rows.append(apart(library, name))
                    print(json.dumps(rows[-1]), file=file, flush=True)
    for library in MAKERS:
        counts = Counter(each["outcome"] for each in rows if each["library"] == library)
        print(f"{library:14}", ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))


if __name__ == "__main__":
    main()
