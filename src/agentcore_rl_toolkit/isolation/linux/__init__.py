"""What the Linux kernel offers to confine a process: namespaces, Landlock, seccomp, control groups."""
