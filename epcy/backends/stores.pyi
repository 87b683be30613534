class Stores:
    name: str
