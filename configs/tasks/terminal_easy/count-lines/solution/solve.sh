wc -l < list.txt > count.txt
