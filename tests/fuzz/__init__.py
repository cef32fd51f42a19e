"""Random configurations of engine and runner, each from one seed, compared with eager."""
