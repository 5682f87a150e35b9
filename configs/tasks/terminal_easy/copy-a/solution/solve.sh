cp a.txt b.txt
