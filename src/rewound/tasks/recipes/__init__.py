"""The tasks that come with the package, one file each."""

from collections.abc import Mapping

from rewound.foundations.errors import InputError
from rewound.foundations.names import imported, unknown
from rewound.tasks.recipe import Recipe, check_class

# Imported on use: a recipe may need an extra that is not installed.
RECIPES: Mapping[str, str] = {
    "cifar10-resnet20": "rewound.tasks.recipes.cifar10:ResNet20",
    "cifar10-resnet56": "rewound.tasks.recipes.cifar10:ResNet56",
    "cifar10-resnet110": "rewound.tasks.recipes.cifar10:ResNet110",
    "digits": "rewound.tasks.recipes.digits:Digits",
    "ende-gnmt": "rewound.tasks.recipes.translation:EnDe",
    "imagenet-resnet34": "rewound.tasks.recipes.imagenet:ImageNetResNet34",
    "imagenet-resnet50": "rewound.tasks.recipes.imagenet:ImageNetResNet50",
    "imagenette-resnet50": "rewound.tasks.recipes.imagenet:ImagenetteResNet50",
    "multi30k-gnmt": "rewound.tasks.recipes.translation:Multi30k",
    "tinyimagenet-resnet50": "rewound.tasks.recipes.imagenet:TinyImageNetResNet50",
    "translate-toy": "rewound.tasks.recipes.translation:Toy",
    "wmt16-gnmt": "rewound.tasks.recipes.translation:WMT16",
}


def recipe_named(name: str) -> type[Recipe]:
    """The recipe class of that name, from the table or from `package.module:Class`."""
    if not isinstance(name, str) or (name not in RECIPES and ":" not in name):
        raise InputError(unknown("recipe", name, RECIPES) + " or package.module:Class")
    found = imported("recipe", RECIPES.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        raise InputError(f"recipe {name!r} is not a subclass of rewound.Recipe; name a class that is one")
    check_class(found)
    return found
