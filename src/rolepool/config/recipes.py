"""Recipes: configs that are part of the package, and the folder of the demo that some of them train.

Owns the names of recipes. A recipe's name can be used wherever a config file can.
"""

from pathlib import Path

from rolepool.config.schema import Config
from rolepool.errors import ConfigError

RECIPES_FOLDER = Path(__file__).parent.parent / "recipes"
DEMO_FOLDER = "runs/demo_data"
"""Where the demo's recipes find their model and prompts, below the current folder."""
DEMO_MARKER = "made_by_rolepool.json"
"""A file in the folder of a complete demo."""


def recipe_names() -> list[str]:
    return sorted(file.stem for file in RECIPES_FOLDER.glob("*.yaml"))


def recipe_text(name: str) -> str:
    """The YAML text of a recipe. Its first line is a comment that says what it trains."""
    if name not in recipe_names():
        raise ConfigError(f"recipe {name!r}: there is no such recipe; use one of {', '.join(recipe_names())}")
    return (RECIPES_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def file_of(word: str) -> str:
    """The file of the recipe with this name; any other word is a file itself, and so is a word that names both."""
    is_recipe = word in recipe_names() and not Path(word).is_file()
    return str(RECIPES_FOLDER / f"{word}.yaml") if is_recipe else word


def trains_demo(config: Config) -> bool:
    """Whether a run needs the demo in `DEMO_FOLDER`, and rolepool may make it there."""
    models = (config.actor_rollout_ref.model.path, config.critic.model.path, config.reward_model.model.path)
    paths = (*config.data.train_files, *config.data.val_files, *models)
    folder = Path(DEMO_FOLDER)
    is_ours = (folder / DEMO_MARKER).exists() or not folder.exists()
    return is_ours and any(str(path).startswith(f"{DEMO_FOLDER}/") for path in paths)
