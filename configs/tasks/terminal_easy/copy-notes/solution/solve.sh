cp notes.txt copy.txt
