"""A local page for what-if planning: a model and a fleet moved by sliders, every platform predicted as they move. No torch here."""
