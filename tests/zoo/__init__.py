"""Small LightningModules in the style of real projects, by name. Steps that a graph cannot hold are among them."""

from zoo import audio, generative, habits, language, projects, representation, structured, vision
from zoo.entry import Entry

ZOO: dict[str, Entry] = {
    **vision.ENTRIES,
    **language.ENTRIES,
    **generative.ENTRIES,
    **representation.ENTRIES,
    **structured.ENTRIES,
    **audio.ENTRIES,
    **habits.ENTRIES,
    **projects.ENTRIES,
}

__all__ = ["ZOO", "Entry"]
