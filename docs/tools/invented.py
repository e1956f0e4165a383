"""Invented films, people and stories: small data with which a page looks like a real one."""

from __future__ import annotations

import random
from collections.abc import Iterator

FILMS = {
    "sea": [
        "The Salt Lighthouse",
        "Harbour of Glass",
        "Low Tide",
        "The Last Ferryman",
        "A Map of Small Islands",
        "North of the Shoals",
        "The Drowned Bell",
        "Nine Days to Landfall",
    ],
    "space": [
        "Orbit of Crows",
        "The Tin Planet",
        "Static Bloom",
        "Beyond Kepler Road",
        "A Signal for Mara",
        "Seven Dark Moons",
        "The Long Airlock",
        "Gravity for Beginners",
    ],
    "crime": [
        "The Ninth Alibi",
        "Dead Letter Street",
        "A Knife in Velvet",
        "The Quiet Witness",
        "Night Shift at Hollow Creek",
        "Two Keys, One Door",
        "The Glass Confession",
        "Nobody Left the Train",
    ],
    "comedy": [
        "Marmalade Summer",
        "Two Left Shoes",
        "The Wrong Wedding",
        "Breakfast at Noon",
        "Cousins by Mistake",
        "The Goat Will See You Now",
        "How Not to Row",
        "My Landlord the Duke",
    ],
    "history": [
        "The Copper Bridge",
        "A Winter in Tarn",
        "The Cartographer’s Daughter",
        "Salt and Silver",
        "The Queen’s Glazier",
        "Letters from Velm",
        "The Miller’s War",
        "Under the Old Clock",
    ],
    "family": [
        "The Paper Kite",
        "Otter Wants a Hat",
        "The Moon Bakery",
        "Pip and the Weather",
        "A Bear Called Tuesday",
        "The Smallest Circus",
        "Grandmother’s Submarine",
        "Good Night, Elevator",
    ],
}
NAMES = (
    "amelie anders anna anton aylin ben bruno carla carmen chiara dario dmitri elif emil farid felix fiona greta "
    "hanna hugo ida ines jonas julia karim katja lars leila lina luca maja marco mila nadia nils olga omar paul "
    "rosa samir selma sofia theo tomas vera viktor yara zoe"
)
PEOPLE = NAMES.split()


def watched(events: int, seed: int) -> list[str]:
    """What someone watches: mostly the next unseen film of one kind, for a while, then of another."""
    dice = random.Random(seed)
    kinds = dice.sample(list(FILMS), 2 if seed % 3 else 3)
    seen: list[str] = []
    kind = kinds[0]
    while len(seen) < events:
        if dice.random() < 0.2:
            kind = dice.choice(kinds)
        shelf = FILMS[kind] if dice.random() > 0.06 else FILMS[dice.choice(list(FILMS))]
        left = [film for film in shelf if film not in seen[-30:]]
        if left:
            seen.append(left[0] if dice.random() < 0.55 else dice.choice(left))
        else:
            kind = dice.choice(list(FILMS))
    return seen


HEROES = [
    ("the keeper", "she"),
    ("the old captain", "he"),
    ("the baker", "she"),
    ("the clockmaker", "he"),
    ("the girl", "she"),
]
PLACES = ["the harbour", "the lighthouse", "the market", "the mill", "the bridge", "the old town"]
TIMES = ["In the evening", "At dawn", "That winter", "After the storm", "On the first day of spring", "Late at night"]
THINGS = [
    "a small brass key",
    "a letter without a name",
    "a blue lantern",
    "a wet map",
    "a basket of pears",
    "a silver bell",
]
WEATHER = [
    "the fog lay low over the water",
    "the rain had stopped at last",
    "snow fell without a sound",
    "the wind smelled of salt",
    "the lamps were still burning",
]
ENDS = [
    "Nobody asked where it came from.",
    "From then on the door was never locked.",
    "The whole town heard of it by noon.",
    "And the light on the hill did not go out again.",
    "It is still there today, if you know where to look.",
]


def story(dice: random.Random) -> str:
    """A short story with someone, somewhere, who finds something, and whom it is remembered by."""
    (who, they), place, thing = dice.choice(HEROES), dice.choice(PLACES), dice.choice(THINGS)
    other = dice.choice([name for name, _ in HEROES if name != who])
    sentences = [
        f"{dice.choice(TIMES)} {dice.choice(WEATHER)}, and {who} walked down to {place}.",
        dice.choice(
            [
                f"There, under a stone, {they} found {thing}.",
                f"On the steps {they} saw {thing} that had not been there before.",
                f"{other.capitalize()} was waiting with {thing}.",
            ]
        ),
        dice.choice(
            [
                f"{they.capitalize()} turned it over twice and put it into a pocket.",
                f"“This is not mine,” said {who}, “but I know whose it is.”",
                f"For a while {they} only listened to the gulls.",
                f"“Keep it,” said {other}, “until someone asks for it.”",
            ]
        ),
        dice.choice(
            [
                f"Then {they} went home by the long way, past {dice.choice(PLACES)}, and {dice.choice(WEATHER)}.",
                f"{other.capitalize()} came by in the morning and asked for {thing}.",
                f"Back in the kitchen {they} lit a candle and began to write.",
            ]
        ),
        dice.choice(ENDS),
    ]
    return " ".join(sentences)


def stories(count: int, seed: int = 0) -> Iterator[str]:
    """Documents of a few stories each."""
    dice = random.Random(seed)
    for _ in range(count):
        yield "\n\n".join(story(dice) for _ in range(4))
