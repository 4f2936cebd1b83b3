"""Search for the settings of a recipe that give the best model."""
