mv old.txt new.txt
