ls
cat apple.txt
echo blue > new.txt
