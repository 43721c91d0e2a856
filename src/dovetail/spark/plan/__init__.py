"""Plans a join from a DataFrame: resolves and checks names, keys, codes and types before any data moves."""
