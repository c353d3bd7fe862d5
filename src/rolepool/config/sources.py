"""The files of a config: recipes, which are part of the package, and YAML files with a `defaults`
list, as verl and its users write them for Hydra.

Owns the names of recipes, which can be used wherever a config file can; the folder of the demo that
some of them train; and finding and merging the files of a `defaults` list. Knows the forms of
entries that verl's configs use: `_self_`, `name`, `group: name` and `group@section: name`. Hydra
itself is not used, because its versions need another OmegaConf.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rolepool.config.schema import Config
from rolepool.errors import ConfigError

RECIPES_FOLDER = Path(__file__).parent.parent / "recipes"
DEMO_FOLDER = "runs/demo_data"
"""Where the demo's recipes find their model and prompts, below the current folder."""
DEMO_MARKER = "made_by_rolepool.json"
"""A file in the folder of a complete demo."""
OWN_NAMES = ("ppo_trainer", "_generated_ppo_trainer")
"""Files of verl that contain its defaults. If they are not found, rolepool's defaults are used,
which are the same."""


def recipe_names() -> list[str]:
    return sorted(file.stem for file in RECIPES_FOLDER.glob("*.yaml"))


def recipe_text(name: str) -> str:
    """The YAML text of a recipe. Its first line is a comment that says what it trains."""
    names = recipe_names()
    if name not in names:
        choices = ", ".join(names)
        raise ConfigError(f"recipe {name!r}: there is no such recipe; use one of {choices}")
    file = RECIPES_FOLDER / f"{name}.yaml"
    return file.read_text(encoding="utf-8")


def makes_demo(config: Config) -> bool:
    """Whether a run needs files of the demo in `DEMO_FOLDER`, which do not exist yet."""
    paths = (
        *config.data.train_files,
        *config.data.val_files,
        config.actor_rollout_ref.model.path,
        config.critic.model.path,
        config.reward_model.model.path,
    )
    return any(map(is_demo_to_make, paths))


def is_demo_to_make(path: str | None) -> bool:
    """Whether a file or folder belongs to the demo, and will be made when the run starts."""
    return _is_in_demo(path) and not Path(DEMO_FOLDER).exists()


def _is_in_demo(path: str | None) -> bool:
    return str(path).startswith(f"{DEMO_FOLDER}/")


def load_file(file: str) -> Any:
    """The content of a recipe or a YAML file, merged with the files of its `defaults` list.
    References are not resolved."""
    path = Path(file)
    if file in recipe_names() and not path.is_file():
        path = RECIPES_FOLDER / f"{file}.yaml"
    tree = OmegaConf.load(path)
    if not isinstance(tree, DictConfig):
        return OmegaConf.to_container(tree, resolve=False)
    folder = path.parent
    composed = _compose(tree, folder, [folder, *_search_folders(tree)])
    content: Any = OmegaConf.to_container(composed, resolve=False)
    return {name: value for name, value in content.items() if name != "hydra"}


def _search_folders(tree: DictConfig) -> list[Path]:
    """Where else the files of a `defaults` list may be, except in Python packages."""
    entries = OmegaConf.select(tree, "hydra.searchpath", default=[]) or []
    folders = []
    for entry in entries:
        folder = str(entry)
        if not folder.startswith("pkg://"):
            folders.append(Path(folder.removeprefix("file://")))
    return folders


def named_file(folder: str | None, name: str | None) -> list[str]:
    """The file that the options `--config-path` and `--config-name` name, if there is one to
    load."""
    if name is None:
        return []
    if not name.endswith((".yaml", ".yml")):
        name = f"{name}.yaml"
    path = Path(folder or ".", name)
    if path.stem in OWN_NAMES and not path.is_file():
        return []
    return [str(path)]


def _compose(tree: Any, folder: Path, roots: list[Path]) -> Any:
    """A file's content on top of its defaults, or where `_self_` stands in their list."""
    own: Any = OmegaConf.to_container(tree, resolve=False)
    listed = own.pop("defaults", [])
    if "_self_" not in listed:
        listed = [*listed, "_self_"]
    parts: list[Any] = []
    for name, section in _entries(listed):
        if name == "_self_":
            parts.append(own)
            continue
        path = _find([folder, *roots], f"{name}.yaml")
        if path is not None:
            file = OmegaConf.load(path)
            part = _compose(file, path.parent, roots)
            parts.append(_in_section(part, section))
        elif name not in OWN_NAMES:
            raise ConfigError(
                f"defaults: {name}.yaml is not in {folder}; add it, or remove it from the list"
            )
    return OmegaConf.merge(*parts)


def _find(folders: Iterable[Path], name: str) -> Path | None:
    for folder in folders:
        path = folder / name
        if path.is_file():
            return path
    return None


def _in_section(tree: Any, section: str) -> Any:
    """The content of a file as that of a section; "" if it is not for a section."""
    if not section:
        return tree
    for name in reversed(section.split(".")):
        tree = OmegaConf.create({name: tree})
    return tree


def _entries(listed: list[Any]) -> Iterator[tuple[str, str]]:
    """The file, without its ending, and the section of each entry of a `defaults` list.

    A name may contain the choice of an earlier entry: `${model_engine}_actor` after `model_engine:
    dp`.
    """
    choices: dict[str, str] = {}
    for entry in listed:
        if isinstance(entry, str):
            yield entry.removesuffix(".yaml"), ""
            continue
        for group, name in entry.items():
            words = group.split()  # the words `optional` and `override` may come first
            if name is None or "hydra" in words[-1] or "override" in words[:-1]:
                continue
            folder, at, section = words[-1].partition("@")
            if not at:
                section = folder.replace("/", ".").strip(".")
            if section in ("_here_", "_global_"):
                section = ""
            chosen = str(name)
            for group_before, choice in choices.items():
                chosen = chosen.replace(f"${{{group_before}}}", choice)
            choices[folder] = chosen
            file = chosen.removesuffix(".yaml")
            yield f"{folder}/{file}", section
