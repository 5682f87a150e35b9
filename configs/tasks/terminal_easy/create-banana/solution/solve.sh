echo banana > banana.txt
