"""The options of each optimizer and their meanings, as the headers have them. Written by tests/meta/options_page.py."""

NAMES = {
    "FusedAdam":
        'lr betas eps weight_decay initial_lr bias_correction master_weights finite_check rounding seed '
        'state_bits amsgrad',
    "FusedAdamW":
        'lr betas eps weight_decay initial_lr bias_correction master_weights finite_check rounding seed '
        'state_bits amsgrad',
    "FusedLamb":
        'lr betas eps weight_decay initial_lr bias_correction master_weights finite_check rounding seed '
        'state_bits min_coeff max_coeff adapt',
    "Muon":
        'lr betas eps weight_decay initial_lr bias_correction master_weights finite_check rounding seed '
        'state_bits orthogonalize momentum nesterov adjust_lr_fn ns_steps ns_coefficients precision split '
        'normalize_rows row_beta cautious_decay',
    "OneBitMuon":
        'lr betas eps weight_decay initial_lr bias_correction master_weights finite_check rounding seed '
        'state_bits orthogonalize momentum nesterov adjust_lr_fn ns_steps ns_coefficients precision split '
        'normalize_rows row_beta cautious_decay scale block_scales compress_alone hierarchical',
    "OneBitAdam":
        'lr betas eps weight_decay initial_lr bias_correction master_weights scale block_scales '
        'compress_alone hierarchical compress freeze_step freeze_automatically allow_early_freeze '
        'variance_floor compress_vectors one_bit bucket_bytes overlap_backward refresh_variance_every',
    "OneBitLamb":
        'lr betas eps weight_decay initial_lr bias_correction master_weights min_coeff max_coeff adapt scale '
        'block_scales compress_alone hierarchical compress coeff_beta factor_min factor_max factor_threshold '
        'freeze_step freeze_automatically allow_early_freeze variance_floor compress_vectors one_bit '
        'bucket_bytes overlap_backward',
    "OwnRule":
        'lr betas eps weight_decay initial_lr bias_correction master_weights finite_check rounding seed '
        'state_bits',
    "FusedRmsprop":
        'lr alpha eps weight_decay momentum centered maximize initial_lr master_weights finite_check rounding'
        ' seed',
    "ScheduleFreeAdamW":
        'lr betas eps weight_decay initial_lr bias_correction master_weights finite_check rounding seed '
        'state_bits warmup_steps r weight_lr_power',
    "FusedSgd":
        'lr momentum dampening weight_decay nesterov maximize initial_lr master_weights finite_check rounding'
        ' seed',
}

MEANINGS = {
    "lr":
        'Learning rate, >= 0.',
    "betas":
        'Decay rates of the first and second moment, each in [0, 1).',
    "eps":
        'Added to the denominator, outside the square root, >= 0.',
    "weight_decay":
        'How strongly a step pulls parameters to zero, >= 0. Adam, SGD and RMSprop add weight_decay * '
        'parameter to the gradient (L2). AdamW, Muon and 1-bit Adam take it from the parameter, times lr. '
        'LAMB and 1-bit LAMB add it to the update, before the trust ratio scales that. Schedule-Free AdamW '
        'adds it to the update at the weights of training.',
    "initial_lr":
        'The learning rate that a schedule multiplies with its factor, >= 0. Where it is unset, the schedule '
        'first sets it to lr.',
    "bias_correction":
        'Correct both moments for their start at zero.',
    "master_weights":
        'How 16-bit parameters keep the digits that their own dtype cannot hold. OneBitAdam and OneBitLamb '
        "need a master copy or a remainder and refuse 'none'.",
    "finite_check":
        'True: all gradients are checked before a step. Where one is NaN or infinite, the step changes '
        'nothing and counts as skipped. So it does where one is so large that the sum of squares overflows '
        '(fp32 within 32,768 elements, beyond 1e19). The value must be the same in every group of an '
        'optimizer. A check reads the gradients once more.',
    "rounding":
        'How bf16 parameters without master weights are rounded.',
    "seed":
        'The seed of stochastic rounding.',
    "state_bits":
        'Bits of a moment: 32, or 8 for FusedAdam, FusedAdamW, FusedLamb, Muon, and the groups of OneBitMuon '
        "that take AdamW. In 8 bits both moments together take 2.125 bytes per parameter, the one of Muon's "
        'matrices 1.0625: codes, and a scale for every 32 elements. It belongs to the run and is not saved; '
        'state of the other format is converted by the next step.',
    "amsgrad":
        'Divide by the running maximum of the second moment (Reddi et al., arXiv:1904.09237).',
    "min_coeff":
        'The trust ratio |parameter| / |update| is kept between these; 0 <= min_coeff <= max_coeff.',
    "max_coeff":
        'The trust ratio |parameter| / |update| is kept between these; 0 <= min_coeff <= max_coeff.',
    "adapt":
        'False: the trust ratio is 1; in 1-bit LAMB coefficient and factor are. Customary for biases and the '
        'parameters of normalisations.',
    "orthogonalize":
        "True: Muon's rule, for parameters of two dimensions or more, of which the first are the rows. Betas "
        "and eps are not read then, and the step is not corrected for the momentum's start at zero. False: "
        "AdamW's rule, for embeddings, the last layer, and vectors. It must stay as it is once the group has "
        'taken a step.',
    "momentum":
        'The decay rate of the momentum, in [0, 1).',
    "nesterov":
        "Nesterov's momentum: a step looks ahead, by the gradient and the momentum together. Muon "
        'orthogonalises the two as one; SGD needs a momentum above 0 and no dampening for it.',
    "adjust_lr_fn":
        "The factor of Muon's steps; torch.optim.Muon's default is original.",
    "ns_steps":
        'How many iterations orthogonalise a matrix, 1 to 100.',
    "ns_coefficients":
        'The coefficients of the iterations.',
    "precision":
        'The dtype of the matrix products. fp64 parameters take fp64.',
    "split":
        'A matrix consists of so many of equal size, one below the other, and each is orthogonalised by '
        'itself: 3 for query, key and value in one, or the number of heads. It must divide the rows.',
    "normalize_rows":
        'NorMuon (arXiv:2510.05491): each row of an orthogonalised matrix, or of a piece of it, is divided by'
        ' the root of a running mean of its squares, and the whole then brought back to the norm that it had.'
        ' So no row moves much faster than others.',
    "row_beta":
        'The decay rate of the mean of squares of normalize_rows, in [0, 1).',
    "cautious_decay":
        'Cautious weight decay (arXiv:2510.12402): only weights that the step itself brings nearer to zero, '
        'or does not move, decay.',
    "scale":
        "What a sign stands for: the root of the mean square (the paper's), or the mean magnitude.",
    "block_scales":
        'Every 2,048 elements have a scale of their own; False: one for the whole buffer, as in the papers, '
        'whose small tensors are then driven by the noise of large ones.',
    "compress_alone":
        'A single rank has nothing to send, and by default its momentum is not compressed. True: it is '
        'rounded to signs all the same, for tests and studies.',
    "hierarchical":
        'Each node is one worker: gradients are averaged in full precision inside nodes, and signs travel '
        "between nodes only, W / Communicator.ranks_per_node() instead of W workers' of them. Needs as many "
        'ranks on every node. With a single node nothing is compressed.',
    "compress":
        'False: the group stays with AdamW, or LAMB, for the whole run, and its gradients are averaged in '
        'full precision. That suits parameters that are few but sensitive. What is fp64 and would be '
        'compressed must be in such a group.',
    "freeze_step":
        'Set this or freeze_automatically. After so many steps of AdamW or LAMB (>= 1) the variance freezes '
        'and compression starts.',
    "freeze_automatically":
        'The number of steps that the run takes (>= 4). The variance then freezes by itself between 15 and 30'
        ' % of the run, as soon as it stands still, and not before learning-rate warm-up and curriculum have '
        'ended.',
    "allow_early_freeze":
        'The variance may freeze although a curriculum or a learning-rate warm-up has not ended.',
    "variance_floor":
        "The least variance that an element divides by, as a share of its tensor's mean variance, in [0, 1]; "
        '0 sets no floor. Without a floor, elements that had almost no gradients before the freeze turn the '
        "noise of signs into steps as large as Adam's can be at all. Those that had none stay as they are "
        'while momentum travels as signs, with or without a floor, until a refresh has seen a gradient.',
    "compress_vectors":
        'False: parameters of less than two dimensions (biases, gains of normalisations) stay in full '
        'precision in compressed groups, too. They are few, and their gradients are of another size than '
        "those of matrices, or noise alone: of a bias before batch norm, or of a key's.",
    "one_bit":
        'False: gradients are averaged in full precision after the freeze, too. A control, which shows what '
        'the frozen variance alone costs.',
    "bucket_bytes":
        'Momentum travels in buckets, cut in the order of the parameters: a bucket takes no more of them once'
        ' it has so many bytes (>= 1), counted as 4 an element. While the signs of one are on their way, the '
        'next is compressed and the one before updates its parameters. Each has messages, and without '
        'block_scales scales, of its own. Not part of the state: a checkpoint goes on with any. Unset: one '
        'bucket.',
    "overlap_backward":
        "In a Session, a bucket's momentum is compressed and travels as soon as backward has all its "
        'gradients; the step waits for what is still on its way and updates. Momentum then leaves before all '
        'gradients were seen: nothing may scale the loss, or clip gradients but by the norm of the step '
        'before (GradientClippingOptions.by_previous_norm), and one that is not finite is an error, after '
        'which a checkpoint must be loaded, where else the step would be skipped. Not with hierarchical. Not '
        'part of the state.',
    "refresh_variance_every":
        'Every K-th step after the freeze travels in full precision and brings the variance up to date; 0: '
        'never.',
    "coeff_beta":
        'In warm-up the trust ratios are averaged with this decay rate, in [0, 1); after the freeze their '
        "mean is the tensor's coefficient.",
    "factor_min":
        'A factor multiplies the coefficient: how much the variance would have changed since the freeze. It '
        'stays between factor_min and factor_max, 0 < factor_min <= factor_max. Above 1 it raises the rate '
        '(the paper: 4).',
    "factor_max":
        'A factor multiplies the coefficient: how much the variance would have changed since the freeze. It '
        'stays between factor_min and factor_max, 0 < factor_min <= factor_max. Above 1 it raises the rate '
        '(the paper: 4).',
    "factor_threshold":
        'From one step to the next the factor changes by at most this share, in [0, 1).',
    "alpha":
        'The decay rate of the means of squares and of gradients, in [0, 1).',
    "centered":
        'The square of the mean gradient is taken from the mean of squares, so that gradients are divided by '
        'their deviation.',
    "maximize":
        'Steps go up the gradient.',
    "warmup_steps":
        'The learning rate rises linearly over so many steps, >= 0, and is whole in the last of them.',
    "r":
        'A step counts in the average as its number to this power, in [0, 16].',
    "weight_lr_power":
        'The same, times the largest learning rate so far to this power, in [0, 16].',
    "dampening":
        'How much of a gradient does not enter the momentum, in [0, 1); the first one enters whole, as in '
        'torch.',
}
