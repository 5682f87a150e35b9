mkdir -p a/b
