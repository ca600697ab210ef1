"""How the model that comes with this package was trained."""
