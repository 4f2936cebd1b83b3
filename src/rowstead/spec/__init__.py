"""The nouns: frozen specs of model, data and training, and how YAML becomes them. No torch here."""
